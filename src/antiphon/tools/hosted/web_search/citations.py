"""Citations of web pages: links in the text of the model become `url_citation` annotations."""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from antiphon.protocol.content import UrlCitation

# A Markdown link, in parentheses or not, or a URL by itself. A URL ends before a bracket, a quotation mark or a space.
_LINK = re.compile(
    r"(?P<open>\()?\[(?P<label>[^\[\]\n]{0,500})\]\((?P<url>https?://[^\s()<>\"]*(?:\([^\s()<>\"]*\)[^\s()<>\"]*)*)"
    r"(?:\s+\"[^\"\n]*\")?\)(?(open)\))?"
    r"|(?P<bare>https?://[^\s\[\]()<>\"'`]+)"
)
# Punctuation at the end of a URL by itself belongs to the sentence.
_TRAILING = ".,;:!?*_"
# The beginning of a Markdown link at the end of the text.
_PARTIAL = re.compile(r"\(?(?:\[[^\[\]\n]{0,500}(?:\](?:\((?:h[^\s<>\"]*(?:\s+\"[^\"\n]*\"?)?)?)?)?)?\Z")
# Longer links are not found.
_MAX_LINK_LENGTH = 4096


class LinkCitations:
    """Finds the links to sources in a text that arrives in parts. `sources` are the titles by URL."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._rest = ""
        self._offset = 0

    def feed(self, text: str, *, is_last: bool = False) -> list[UrlCitation]:
        """Return the citations that are complete with this text."""
        rest = self._rest + text
        # More of a link may follow at the end of the text.
        partial = None if is_last else _PARTIAL.search(rest)
        limit = len(rest) if partial is None else partial.start()
        found: list[UrlCitation] = []
        position = 0
        for match in _LINK.finditer(rest):
            if match.start() >= limit or (match.end() == len(rest) and not is_last):
                break
            position = match.end()
            citation = self._make_citation(match)
            if citation is not None:
                found.append(citation)
        position = max(position, len(rest) - _MAX_LINK_LENGTH)
        self._rest = rest[position:]
        self._offset += position
        return found

    def _make_citation(self, match: "re.Match[str]") -> UrlCitation | None:
        start, end = match.span()
        url = match["url"] or match["bare"]
        if match["bare"]:
            url = url.rstrip(_TRAILING)
            end = start + len(url)
        source = self._find_source(url)
        if source is None:
            return None
        return UrlCitation(source, self._sources[source] or source, self._offset + start, self._offset + end)

    def _find_source(self, url: str) -> str | None:
        """Return the source with this URL. A fragment and a slash at the end make no difference."""
        if url in self._sources:
            return url
        wanted = _simplify(url)
        return next((source for source in self._sources if _simplify(source) == wanted), None)


def _simplify(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    return parts._replace(netloc=parts.netloc.lower(), path=parts.path.rstrip("/"), fragment="").geturl()
