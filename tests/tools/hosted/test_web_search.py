"""The hosted tool `web_search`: providers in their own formats, actions, filters, citations and failures."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from antiphon.config.tools import WebSearchSettings
from antiphon.errors import InvalidRequest
from antiphon.stream.deltas import Annotate, Text
from antiphon.tools.hosted.base import HostedSession
from antiphon.tools.hosted.web_search.citations import LinkCitations
from antiphon.tools.hosted.web_search.pages import Page, read_page
from antiphon.tools.hosted.web_search.tool import WebSearchHostedTool
from antiphon.upstream.addresses import OutboundRules
from antiphon.upstream.outbound import Fetched
from support.hosted_sessions import compose, list_types, make_context, run_call
from support.upstream_server import STALL, Reply, UpstreamServer, json_of, serve

KEY = "provider-key-1234"
PAGES = [("https://one.example.org/a", "One", "First text."), ("https://two.example.com/b", "Two", "Second text.")]


def answer_searxng(pages: Any = PAGES, **fields: Any) -> Reply:
    results = [{"url": url, "title": title, "content": text, "engine": "x"} for url, title, text in pages]
    return json_of({"query": "q", "results": results, "unresponsive_engines": [], **fields})


ANSWERS = {
    "searxng": answer_searxng(),
    "brave": json_of(
        {
            "type": "search",
            "web": {"results": [{"url": url, "title": title, "description": text} for url, title, text in PAGES]},
        }
    ),
    "tavily": json_of(
        {"results": [{"url": url, "title": title, "content": text, "score": 0.5} for url, title, text in PAGES]}
    ),
    "exa": json_of(
        {"requestId": "1", "results": [{"url": url, "title": title, "text": text} for url, title, text in PAGES]}
    ),
}


@asynccontextmanager
async def hosting(
    server: UpstreamServer, provider: str = "searxng", key: str | None = None, **options: Any
) -> AsyncIterator[WebSearchHostedTool]:
    base = server.url.removesuffix("/v1")
    key = key or (None if provider == "searxng" else KEY)
    tool = WebSearchHostedTool(WebSearchSettings(provider=provider, base_url=base, api_key=key, **options))
    await tool.start()
    try:
        yield tool
    finally:
        await tool.close()


async def open_session(tool: WebSearchHostedTool, items: Any = (), rules: Any = None, **fields: Any) -> HostedSession:
    rules = rules if rules is not None else OutboundRules.parse(["127.0.0.1"])
    context = make_context([{"type": "web_search"} | fields], rules=rules, input=list(items))
    assert context.request.tools is not None
    return await tool.open(context.request.tools[0], context)


async def search(session: HostedSession, arguments: str = '{"query": "cats"}') -> dict[str, Any]:
    _, output = compose(await run_call(session, "web_search", arguments))
    return dict(output[0])


async def test_search_has_the_documented_events() -> None:
    async with serve([answer_searxng()]) as server, hosting(server) as tool:
        session = await open_session(tool)
        events, output = compose(await run_call(session, "web_search", '{"query": "cats"}'))
    assert list_types(events) == [
        "output_item.added",
        "web_search_call.in_progress",
        "web_search_call.searching",
        "web_search_call.completed",
        "output_item.done",
    ]
    assert events[0]["item"] == {"type": "web_search_call", "id": "ws_1", "status": "in_progress"}
    assert output == [
        {
            "type": "web_search_call",
            "id": "ws_1",
            "action": {
                "type": "search",
                "query": "cats",
                "queries": ["cats"],
                "sources": [{"type": "url", "url": url} for url, _, _ in PAGES],
            },
            "status": "completed",
            "results": [
                {"type": "text_result", "url": url, "title": title, "text": text} for url, title, text in PAGES
            ],
        }
    ]


@pytest.mark.parametrize("provider", ANSWERS)
async def test_each_provider_is_used_in_its_own_format(provider: str) -> None:
    async with serve([ANSWERS[provider]]) as server, hosting(server, provider) as tool:
        filters = {"allowed_domains": ["example.org", "example.com"], "blocked_domains": ["bad.org"]}
        session = await open_session(tool, filters=filters, user_location={"type": "approximate", "country": "de"})
        item = await search(session)
    assert [result["text"] for result in item["results"]] == ["First text.", "Second text."]
    request = server.requests[0]
    sites = "cats (site:example.org OR site:example.com) -site:bad.org"
    expected: dict[str, Any] = {
        "searxng": ("GET", "/search", {"q": sites, "format": "json"}, None),
        "brave": ("GET", "/res/v1/web/search", {"q": sites, "count": "8", "country": "DE"}, None),
        "tavily": (
            "POST",
            "/search",
            {},
            {
                "query": "cats",
                "max_results": 8,
                "include_domains": ["example.org", "example.com"],
                "exclude_domains": ["bad.org"],
            },
        ),
        "exa": (
            "POST",
            "/search",
            {},
            {
                "query": "cats",
                "numResults": 8,
                "contents": {"text": {"maxCharacters": 1000}},
                "includeDomains": ["example.org", "example.com"],
                "excludeDomains": ["bad.org"],
                "userLocation": "DE",
            },
        ),
    }
    body = request.json if request.body else None
    assert (request.method, request.path, request.query, body) == expected[provider]
    names = {"brave": "x-subscription-token", "exa": "x-api-key", "tavily": "authorization"}
    sent = {name: value for name, value in request.headers.items() if KEY in value}
    value = f"Bearer {KEY}" if provider == "tavily" else KEY
    assert sent == ({} if provider == "searxng" else {names[provider]: value})


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            answer_searxng([], unresponsive_engines=[["google", "timeout"], ["bing", "access denied"]]),
            "No search engine answered: google: timeout, bing: access denied.",
        ),
        (json_of({"error": f"bad {KEY}"}, 403), "status 403"),
        (Reply(body=b"<html>"), "not in the expected format"),
        (json_of({"results": [{"title": "no url"}]}), "not in the expected format"),
        (Reply(pieces=[b'{"results"', STALL]), "did not answer in time"),
    ],
)
async def test_failure_of_the_provider_is_a_failed_item(reply: Reply, reason: str) -> None:
    seconds = 0.3 if STALL in (reply.pieces or ()) else 60.0
    async with serve([reply]) as server, hosting(server, "searxng", KEY, timeout=seconds) as tool:
        session = await open_session(tool)
        events, (item,) = compose(await run_call(session, "web_search", '{"query": "cats"}'))
    assert list_types(events)[-2:] == ["web_search_call.searching", "output_item.done"]
    assert (item["status"], item["action"]["type"]) == ("failed", "search")
    (error,) = item["results"]
    assert error["type"] == "error"
    assert reason in error["text"]
    assert KEY not in str(item)


async def test_results_that_are_no_pages_are_dropped() -> None:
    page = {"url": "https://example.org/", "title": "a", "content": None}
    others = [{"key": "value"}, {"url": None}, {"url": "javascript:alert(1)"}, "text"]
    async with serve([json_of({"results": [*others, page]})]) as server, hosting(server) as tool:
        item = await search(await open_session(tool))
    assert item["results"] == [{"type": "text_result", "url": "https://example.org/", "title": "a", "text": ""}]


async def test_search_without_results_is_completed() -> None:
    async with serve([answer_searxng([])]) as server, hosting(server) as tool:
        item = await search(await open_session(tool))
    assert (item["status"], item["results"], item["action"]["sources"]) == ("completed", [], [])


async def test_results_of_other_domains_are_dropped() -> None:
    pages = [
        ("https://example.org/", "a", ""),
        ("https://sub.example.org/", "b", ""),
        ("https://badexample.org/", "c", ""),
        ("https://blocked.example.org/x", "d", ""),
        ("http://[bad", "e", ""),
    ]
    async with serve([answer_searxng(pages)]) as server, hosting(server) as tool:
        filters = {"allowed_domains": ["example.org"], "blocked_domains": ["blocked.example.org"]}
        item = await search(await open_session(tool, filters=filters))
    assert [result["title"] for result in item["results"]] == ["a", "b"]


async def test_several_queries_are_one_search_with_distinct_results() -> None:
    async with serve([answer_searxng(), answer_searxng(PAGES[:1])]) as server, hosting(server) as tool:
        item = await search(await open_session(tool), '{"queries": ["cats", "dogs", "cats"]}')
    assert [request.query["q"] for request in server.requests] == ["cats", "dogs"]
    assert (item["action"]["queries"], len(item["results"])) == (["cats", "dogs"], 2)


HTML = (
    b"<html><head><title>The page</title><style>p {}</style></head><body><script>x()</script>"
    b"<h1>Cats</h1><p>Cats are <b>small</b>.</p><p>Dogs are not cats.</p></body></html>"
)


def page_of(body: bytes, kind: str = "text/html; charset=utf-8", status: int = 200) -> Reply:
    return Reply(status=status, headers={"Content-Type": kind}, body=body)


@pytest.mark.parametrize("has_selectolax", [True, False])
async def test_page_is_opened_as_text(has_selectolax: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_selectolax:
        monkeypatch.setitem(sys.modules, "selectolax.lexbor", None)
    async with serve([page_of(HTML)]) as server, hosting(server) as tool:
        session = await open_session(tool)
        opened = await search(session, f'{{"action": "open_page", "url": "{server.url}"}}')
        found = await search(session, f'{{"url": "{server.url}", "pattern": "CATS"}}')
    assert opened["action"] == {"type": "open_page", "url": server.url}
    (result,) = opened["results"]
    assert result["title"] == "The page"
    assert " ".join(result["text"].split()) == "Cats Cats are small. Dogs are not cats."
    assert found["action"] == {"type": "find_in_page", "url": server.url, "pattern": "CATS"}
    assert len(found["results"]) == 3
    assert len(server.requests) == 1  # the page is kept


def test_text_is_found_in_a_page_in_linear_time() -> None:
    page = Page("", "", "\u0130a" + "a" * 1_000_000 + "Ab")
    # With a regular expression, this takes hours.
    assert page.find("a" * 100_000 + "B", max_matches=2, context=0) == ["a" * 99_999 + "Ab"]
    assert page.find("i", max_matches=2, context=1) == ["\u0130a"]


@pytest.mark.parametrize("charset", ["punycode", "idna", "undefined", "unicode_escape", "hex", "none"])
def test_page_in_a_codec_that_is_no_charset_is_read_as_utf8(charset: str) -> None:
    fetched = Fetched(url="", status=200, content_type="text/plain", charset=charset, body="\u00fc-a\\x41".encode())
    assert read_page(fetched).text == "\u00fc-a\\x41"


@pytest.mark.parametrize(
    "charset", ["windows-1252", "iso-8859-1", "latin1", "shift_jis", "gb18030", "utf-16", "koi8-r"]
)
def test_page_is_decoded_by_its_charset(charset: str) -> None:
    text = "\u0434" if charset == "koi8-r" else "\u3042" if charset in ("shift_jis", "gb18030") else "\u00fc"
    fetched = Fetched(url="", status=200, content_type="text/plain", charset=charset, body=text.encode(charset))
    assert read_page(fetched).text == text


@pytest.mark.parametrize(
    ("url", "reply", "reason"),
    [
        ("http://10.0.0.1/", None, "private network"),
        ("http://localhost/", None, "private network"),
        ("file:///etc/passwd", None, "excluded by the filters"),
        ("{server}", Reply(status=302, headers={"Location": "http://169.254.169.254/"}), "private network"),
        ("{server}", page_of(b"no", status=404), "status 404"),
        ("{server}", page_of(b"%PDF", "application/pdf"), "application/pdf"),
        ("{server}", page_of(b"x" * 5000), "larger than 2048 bytes"),
    ],
)
async def test_page_that_cannot_be_opened_is_a_failed_item(url: str, reply: Reply | None, reason: str) -> None:
    async with serve([reply] if reply else []) as server, hosting(server, page_bytes=2048) as tool:
        address = url.format(server=server.url)
        item = await search(await open_session(tool), f'{{"action": "open_page", "url": "{address}"}}')
    assert (item["status"], item["action"]["type"]) == ("failed", "open_page")
    assert reason in item["results"][0]["text"]


async def test_pages_follow_the_filters_of_the_tool() -> None:
    async with serve([]) as server, hosting(server) as tool:
        arguments = f'{{"action": "open_page", "url": "{server.url}"}}'
        filtered = await search(await open_session(tool, filters={"allowed_domains": ["example.org"]}), arguments)
        offline = await search(await open_session(tool, external_web_access=False), arguments)
    assert "excluded by the filters" in filtered["results"][0]["text"]
    assert "external_web_access" in offline["results"][0]["text"]
    assert server.requests == []


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "[]",
        '{"query": ""}',
        '{"action": "open_page"}',
        '{"action": "find_in_page", "url": "http://x.org"}',
        '{"action": "find", "pattern": "x"}',
        '{"action": "fly"}',
    ],
)
async def test_invalid_arguments_are_a_failed_item(arguments: str) -> None:
    async with serve([]) as server, hosting(server) as tool:
        item = await search(await open_session(tool), arguments)
    assert (item["status"], server.requests) == ("failed", [])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"filters": {"allowed_domains": ["https://example.org"]}}, "tools[0].filters.allowed_domains[0]"),
        ({"filters": {"blocked_domains": ["a.org", "b.org/x"]}}, "tools[0].filters.blocked_domains[1]"),
        ({"filters": {"allowed_domains": ["a.org"] * 101}}, "tools[0].filters.allowed_domains"),
        ({"type": "web_search_preview", "filters": {"allowed_domains": ["a.org"]}}, "tools[0].filters"),
        ({"user_location": {"type": "approximate", "country": "Germany"}}, "tools[0].user_location.country"),
    ],
)
async def test_invalid_tool_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    async with serve([]) as server, hosting(server) as tool:
        with pytest.raises(InvalidRequest) as raised:
            await open_session(tool, **fields)
    assert raised.value.param == param


async def test_context_size_sets_the_number_and_length_of_results() -> None:
    pages = [(f"https://p{number}.org/", "t", "x" * 5000) for number in range(20)]
    async with serve([answer_searxng(pages) for _ in range(3)]) as server, hosting(server) as tool:
        sizes = {}
        for size in ("low", "medium", "high"):
            results = (await search(await open_session(tool, search_context_size=size)))["results"]
            sizes[size] = (len(results), len(results[0]["text"]))
    assert sizes == {"low": (5, 300), "medium": (8, 1000), "high": (12, 3000)}


async def test_location_is_part_of_the_instructions() -> None:
    location = {"type": "approximate", "city": "Bern", "country": "CH", "timezone": "Europe/Zurich"}
    async with serve([]) as server, hosting(server) as tool:
        session = await open_session(tool, user_location=location)
    assert session.instructions.endswith("The user is in Bern, CH. Their time zone is Europe/Zurich.")


SOURCES = {"https://one.org/a": "One", "https://two.org/b_(c)": "Two"}


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_links_to_sources_become_citations_however_the_text_is_cut(cut: int) -> None:
    text = (
        "A ([one](https://one.org/a)) b [two](https://two.org/b_(c)). No [x](https://other.org/). "
        "Bare https://one.org/a, and https://one.org/a/#part."
    )
    citations = LinkCitations(SOURCES)
    found = [each for start in range(0, len(text), cut) for each in citations.feed(text[start : start + cut])]
    found += citations.feed("", is_last=True)
    assert [(text[each.start_index : each.end_index], each.title) for each in found] == [
        ("([one](https://one.org/a))", "One"),
        ("[two](https://two.org/b_(c))", "Two"),
        ("https://one.org/a", "One"),
        ("https://one.org/a/#part", "One"),
    ]


async def test_text_is_annotated_only_with_pages_that_were_found() -> None:
    async with serve([answer_searxng()]) as server, hosting(server) as tool:
        session = await open_session(tool)
        assert session.open_text() is None
        item = await search(session)
        texts = session.open_text()
        again = await open_session(tool, items=[item])
    assert texts is not None
    text = f"It is ([One]({PAGES[0][0]})). See [more](https://invented.org/)."
    deltas = [*texts.feed(text), *texts.close()]
    assert deltas[0] == Text(text)
    (annotation,) = [delta.annotation for delta in deltas if isinstance(delta, Annotate)]
    assert (annotation.url, annotation.title) == (PAGES[0][0], "One")  # type: ignore[union-attr]
    assert again.open_text() is not None  # pages of earlier turns can be cited
    await asyncio.sleep(0)
