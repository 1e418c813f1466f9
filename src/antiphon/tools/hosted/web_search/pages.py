"""The text of web pages."""

import codecs
import re

from antiphon.upstream.outbound import Fetched

_TEXT_TYPES = frozenset(
    {"application/json", "application/xml", "application/ld+json", "application/javascript", "application/yaml"}
)
_HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
_META_CHARSET = re.compile(rb"<meta[^>]+charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
_CHARSETS = re.compile(r"utf-(8|16|32)|ascii|iso|cp\d|koi8|mac|gb|big5|euc|shift|hz|johab|tis|latin")
_HEAD_LENGTH = 4096
_MAX_TAGS = 100_000
_SPACES = re.compile(r"[ \t\r\f\v\u00a0]+")
_BLANK_LINES = re.compile(r"\n\s*\n\s*")
HIDDEN_TAGS = ("script", "style", "noscript", "template", "svg", "head", "iframe", "object", "select")
BLOCK_TAGS = frozenset(
    {
        "address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "fieldset", "figcaption", "figure",
        "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre",
        "section", "table", "td", "th", "tr", "ul",
    }
)  # fmt: skip


class Page:
    """A page as text. `title` may be empty."""

    def __init__(self, url: str, title: str, text: str) -> None:
        self.url = url
        self.title = title
        self.text = text

    def find(self, pattern: str, *, max_matches: int, context: int) -> list[str]:
        """Return the passages around each match of a text, ignoring case."""
        # Not with a regular expression: its time grows with the product of the two lengths.
        text, wanted = _fold_case(self.text), _fold_case(pattern)
        found: list[str] = []
        start = text.find(wanted)
        while start >= 0 and len(found) < max_matches:
            end = start + len(wanted)
            found.append(self.text[max(0, start - context) : end + context].strip())
            start = text.find(wanted, end)
        return found


def _fold_case(text: str) -> str:
    """Return a text in lower case with the same length: only this letter becomes two."""
    return text.replace("\u0130", "I").lower()


def is_readable(content_type: str) -> bool:
    """Return True if the content can be read as text. A page without a type is read as HTML."""
    return (
        not content_type
        or content_type.startswith("text/")
        or content_type in _TEXT_TYPES | _HTML_TYPES
        or (content_type.endswith(("+xml", "+json")))
    )


def read_page(fetched: Fetched) -> Page:
    """Convert a fetched page to text. This takes long for a large page: run it in a thread."""
    text = _decode(fetched)
    if fetched.content_type and fetched.content_type not in _HTML_TYPES:
        return Page(fetched.url, "", text.strip())
    title, text = _read_html(text)
    return Page(fetched.url, title, _BLANK_LINES.sub("\n\n", _SPACES.sub(" ", text)).strip())


def _decode(fetched: Fetched) -> str:
    charset = fetched.charset
    if charset is None and (declared := _META_CHARSET.search(fetched.body[:_HEAD_LENGTH])) is not None:
        charset = declared[1].decode("ascii")
    return fetched.body.decode(charset if charset and _is_charset(charset) else "utf-8", errors="replace")


def _is_charset(name: str) -> bool:
    """Return True for a charset of web pages. Python has other codecs, some of which are slow, such as `punycode`."""
    try:
        return _CHARSETS.match(codecs.lookup(name).name) is not None
    except (LookupError, ValueError):
        return False


def _limit_tags(html: str) -> str:
    """Return the start of a page with very many tags: each of them takes hundreds of bytes when it is parsed."""
    if html.count("<") <= _MAX_TAGS:
        return html
    *_, rest = html.split("<", _MAX_TAGS + 1)
    return html[: len(html) - len(rest) - 1]


def _read_html(html: str) -> tuple[str, str]:
    """Return the title and the visible text, with selectolax if it is installed."""
    html = _limit_tags(html)
    try:
        from selectolax.lexbor import LexborHTMLParser
    except ImportError:
        from antiphon.tools.hosted.web_search.html_reader import HtmlReader

        reader = HtmlReader()
        reader.feed(html)
        reader.close()
        return "".join(reader.title).strip(), "".join(reader.text)
    tree = LexborHTMLParser(html)
    title = tree.css_first("title")
    name = title.text(strip=True) if title is not None else ""
    tree.strip_tags(list(HIDDEN_TAGS))
    for node in tree.css(",".join(sorted(BLOCK_TAGS))):
        node.insert_before("\n")
        node.insert_after("\n")
    body = tree.body
    return name, body.text() if body is not None else ""
