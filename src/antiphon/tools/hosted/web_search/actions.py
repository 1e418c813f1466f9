"""The actions of a web search: search, open a page, find a text in a page."""

import msgspec
from msgspec import Struct

from antiphon import offload
from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.tools.hosted.web_search.pages import Page, is_readable, read_page
from antiphon.tools.hosted.web_search.providers import SearchProvider, WebResult, WebSearchOptions
from antiphon.upstream.addresses import OutboundRules
from antiphon.upstream.outbound import fetch

MAX_QUERIES = 4
_MAX_MATCHES = 10
_MATCH_CONTEXT = 300
_MAX_PAGES = 8
_HEADERS = {"Accept": "text/html,application/xhtml+xml,text/plain;q=0.9,*/*;q=0.1"}


class ActionFailed(Exception):
    """An action could not be executed. The message is for the model and the client."""


class _Arguments(Struct):
    """The arguments of the function. Models omit `action`, and write one query or several."""

    action: str | None = None
    query: str | None = None
    queries: list[str] | None = None
    url: str | None = None
    pattern: str | None = None


def read_action(arguments: str) -> JsonObject:
    """Return the action of a call, as its item shows it. Raises ActionFailed."""
    try:
        read = read_json(arguments.strip() or "{}", _Arguments)
    except msgspec.DecodeError as error:
        raise ActionFailed(f"The arguments are invalid: {error}") from None
    kind = read.action or _guess_kind(read)
    match kind:
        case "search":
            queries = [text.strip() for text in (*(read.queries or ()), *([read.query] if read.query else ()))]
            queries = list(dict.fromkeys(text for text in queries if text))[:MAX_QUERIES]
            if not queries:
                raise ActionFailed("A search needs a query.")
            return {"type": "search", "query": queries[0], "queries": queries}
        case "open_page" | "find_in_page" | "find" if not read.url:
            raise ActionFailed(f"The action '{kind}' needs a url.")
        case "open_page":
            return {"type": "open_page", "url": read.url}
        case "find_in_page" | "find":
            if not read.pattern:
                raise ActionFailed("The action 'find_in_page' needs a pattern.")
            return {"type": "find_in_page", "url": read.url, "pattern": read.pattern}
    raise ActionFailed(f"There is no action '{kind}'. The actions are search, open_page and find_in_page.")


def _guess_kind(read: _Arguments) -> str:
    if read.url:
        return "find_in_page" if read.pattern else "open_page"
    return "search"


class ActionRunner:
    """Executes the actions of one response. Its pages are kept, so that a page is fetched once.

    `sources` are the titles of all pages that were found or opened, by URL. `searches` is the number of searches.
    """

    def __init__(
        self,
        provider: SearchProvider,
        options: WebSearchOptions,
        *,
        rules: OutboundRules,
        page_bytes: int,
        page_length: int,
        seconds: float,
        can_fetch: bool,
    ) -> None:
        self._provider = provider
        self._options = options
        self._rules = rules
        self._page_bytes = page_bytes
        self._page_length = page_length
        self._seconds = seconds
        self._can_fetch = can_fetch
        self._pages: dict[str, Page] = {}
        self.sources: dict[str, str] = {}
        self.searches = 0

    async def run(self, action: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
        """Return the action with its sources, and its results for the model. Raises ActionFailed."""
        try:
            if action["type"] == "search":
                return await self._search(action)
            page = await self._open(action["url"])
        except AntiphonError as error:
            raise ActionFailed(error.message) from None
        if action["type"] == "open_page":
            texts = [page.text[: self._page_length]]
        else:
            texts = page.find(action["pattern"], max_matches=_MAX_MATCHES, context=_MATCH_CONTEXT)
        return action, [_make_result(page.url, page.title, text) for text in texts]

    async def _search(self, action: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
        found: dict[str, WebResult] = {}
        for query in action["queries"]:
            self.searches += 1
            for result in await self._provider.search(query, self._options):
                found.setdefault(result.url, result)
        self.sources |= {url: result.title for url, result in found.items()}
        sources = [{"type": "url", "url": url} for url in found]
        results = [_make_result(each.url, each.title, each.text) for each in found.values()]
        return action | {"sources": sources}, results

    async def _open(self, url: str) -> Page:
        page = self._pages.get(url)
        if page is None:
            page = await self._fetch(url)
            if len(self._pages) < _MAX_PAGES:
                self._pages[url] = page
            self.sources[page.url] = page.title
        return page

    async def _fetch(self, url: str) -> Page:
        if not self._can_fetch:
            raise ActionFailed("Pages cannot be opened, because 'external_web_access' is false.")
        domains = self._options.domains
        if not domains.allows(url):
            raise ActionFailed("The domain of this page is excluded by the filters of the search.")
        fetched = await fetch(
            url, rules=self._rules, max_bytes=self._page_bytes, timeout=self._seconds, headers=_HEADERS
        )
        if not domains.allows(fetched.url):
            raise ActionFailed("The page redirects to a domain that the filters of the search exclude.")
        if fetched.status >= 400:
            raise UpstreamError(f"The page answered with status {fetched.status}.")
        if not is_readable(fetched.content_type):
            raise UpstreamError(f"The page has the type {fetched.content_type[:100]}, which cannot be read as text.")
        return await offload.run_in_thread(read_page, fetched)


def _make_result(url: str, title: str, text: str) -> JsonObject:
    return {"type": "text_result", "url": url, "title": title, "text": text}
