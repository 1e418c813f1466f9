"""Search providers: SearXNG, Brave, Tavily and Exa. The operator chooses one in the settings.

A provider that fails raises UpstreamError. An empty list means that the search has found nothing.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol.json_text import read_json
from antiphon.tools.hosted.web_search.domains import DomainFilter
from antiphon.upstream.error_mapping import map_error_response
from antiphon.upstream.http import HttpSession, read_bounded

MAX_ANSWER_BYTES = 4 * 1024 * 1024
_MAX_QUERY_LENGTH = 2000
# Longer lists of domains do not fit into a query. All results are filtered in any case.
_MAX_SITES = 8
_WEB = ("http://", "https://")
_MALFORMED = "The search provider's answer is not in the expected format."


class WebSearchOptions(Struct, frozen=True, kw_only=True):
    """The options of a search. `country` is a code of two letters. `text_length` is for the text of one result."""

    max_results: int
    text_length: int
    country: str | None = None
    domains: DomainFilter = DomainFilter()


class WebResult(Struct, frozen=True):
    url: str
    title: str
    text: str


class _Result(Struct):
    """A result of any provider. They name the text differently."""

    url: str
    title: str | None = None
    content: str | None = None  # SearXNG, Tavily
    description: str | None = None  # Brave
    extra_snippets: list[str] = []  # Brave
    text: str | None = None  # Exa
    highlights: list[str] | None = None  # Exa

    def to_result(self, length: int) -> WebResult:
        parts = (self.content, self.description, self.text, *self.extra_snippets, *(self.highlights or ()))
        text = "\n".join(dict.fromkeys(part.strip() for part in parts if part))
        return WebResult(self.url, (self.title or self.url).strip(), text[:length])


class _Answer(Struct):
    results: list[Any] = []
    unresponsive_engines: list[Any] = []  # SearXNG: pairs of a name and a reason


class _BraveAnswer(Struct):
    web: _Answer | None = None


class SearchProvider:
    """A search provider at `base_url`. Subclasses write the request and read the answer."""

    default_url: ClassVar[str] = ""
    needs_key: ClassVar[bool] = True

    def __init__(self, base_url: str, api_key: str, *, timeout: float) -> None:
        self._timeout = timeout
        self._secrets = frozenset({api_key} - {""})
        self._session = HttpSession(
            base_url, headers=self._make_headers(api_key), map_error=self._map_error, connect_timeout=min(10.0, timeout)
        )

    def open(self) -> None:
        self._session.open()

    async def close(self) -> None:
        await self._session.close()

    async def search(self, query: str, options: WebSearchOptions) -> list[WebResult]:
        """Return the results for a query, best first. Raises UpstreamError if the provider fails."""
        method, path, body = self._make_request(query[:_MAX_QUERY_LENGTH], options)
        deadline = asyncio.get_running_loop().time() + self._timeout
        response = await self._session.send(method, path, body, deadline=deadline)
        try:
            data = await read_bounded(response, limit=MAX_ANSWER_BYTES)
        finally:
            response.close()
        try:
            answer = self._read_answer(data)
        except msgspec.DecodeError:
            raise UpstreamError(_MALFORMED) from None
        found = [result for each in answer.results if (result := _read_result(each)) is not None]
        if answer.results and not found:
            raise UpstreamError(_MALFORMED)
        if not found and answer.unresponsive_engines:
            raise UpstreamError(f"No search engine answered: {_describe_engines(answer.unresponsive_engines)}.")
        results = [each for each in found if options.domains.allows(each.url)]
        return [each.to_result(options.text_length) for each in results[: options.max_results]]

    def _make_headers(self, api_key: str) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def _make_request(self, query: str, options: WebSearchOptions) -> tuple[str, str, bytes | None]:
        raise NotImplementedError

    def _read_answer(self, data: bytes) -> _Answer:
        return read_json(data, _Answer)

    def _map_error(self, status: int, body: bytes, retry_after: float | None) -> AntiphonError:
        reason = map_error_response(status, body, secrets=self._secrets, retry_after=retry_after).message
        return UpstreamError(f"The search provider answered with status {status}: {reason}", retry_after=retry_after)


class SearxngProvider(SearchProvider):
    """A SearXNG instance. Its setting `search.formats` must contain json. It needs no key."""

    needs_key = False

    def _make_request(self, query: str, options: WebSearchOptions) -> tuple[str, str, bytes | None]:
        return "GET", f"/search?{urlencode({'q': _add_sites(query, options.domains), 'format': 'json'})}", None


class BraveProvider(SearchProvider):
    default_url = "https://api.search.brave.com"

    def _make_headers(self, api_key: str) -> Mapping[str, str]:
        return {"X-Subscription-Token": api_key, "Accept": "application/json"}

    def _make_request(self, query: str, options: WebSearchOptions) -> tuple[str, str, bytes | None]:
        fields = {"q": _add_sites(query, options.domains), "count": str(min(options.max_results, 20))}
        if options.country is not None:
            fields["country"] = options.country
        return "GET", f"/res/v1/web/search?{urlencode(fields)}", None

    def _read_answer(self, data: bytes) -> _Answer:
        return read_json(data, _BraveAnswer).web or _Answer()


class TavilyProvider(SearchProvider):
    default_url = "https://api.tavily.com"

    def _make_request(self, query: str, options: WebSearchOptions) -> tuple[str, str, bytes | None]:
        domains = options.domains
        fields = {
            "query": query,
            "max_results": min(options.max_results, 20),
            "include_domains": domains.allowed or (),
            "exclude_domains": domains.blocked,
        }
        return "POST", "/search", msgspec.json.encode(fields)


class ExaProvider(SearchProvider):
    default_url = "https://api.exa.ai"

    def _make_headers(self, api_key: str) -> Mapping[str, str]:
        return {"x-api-key": api_key}

    def _make_request(self, query: str, options: WebSearchOptions) -> tuple[str, str, bytes | None]:
        fields: dict[str, Any] = {
            "query": query,
            "numResults": options.max_results,
            "contents": {"text": {"maxCharacters": options.text_length}},
        }
        if options.domains.allowed is not None:
            fields["includeDomains"] = options.domains.allowed
        if options.domains.blocked:
            fields["excludeDomains"] = options.domains.blocked
        if options.country is not None:
            fields["userLocation"] = options.country
        return "POST", "/search", msgspec.json.encode(fields)


PROVIDERS: Mapping[str, type[SearchProvider]] = {
    "searxng": SearxngProvider,
    "brave": BraveProvider,
    "tavily": TavilyProvider,
    "exa": ExaProvider,
}


def _read_result(result: Any) -> _Result | None:
    """Return a result of the provider, or None if it is not a web page: SearXNG also finds texts without a URL."""
    try:
        read = msgspec.convert(result, _Result)
    except msgspec.ValidationError:
        return None
    return read if read.url.startswith(_WEB) else None


def _add_sites(query: str, domains: DomainFilter) -> str:
    """Return the query with operators for the domains, as most search engines understand them."""
    allowed = [f"site:{domain}" for domain in (domains.allowed or ())[:_MAX_SITES]]
    blocked = [f"-site:{domain}" for domain in domains.blocked[:_MAX_SITES]]
    sites = [allowed[0] if len(allowed) == 1 else f"({' OR '.join(allowed)})"] if allowed else []
    return " ".join([query, *sites, *blocked])


def _describe_engines(engines: Sequence[Any]) -> str:
    pairs = [each if isinstance(each, list) else [each] for each in engines[:10]]
    return ", ".join(": ".join(str(part)[:100] for part in pair if part) for pair in pairs)
