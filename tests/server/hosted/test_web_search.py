"""The hosted tool `web_search` over HTTP: citations, `include`, and the usual handling without a provider."""

from collections.abc import Iterator
from typing import Any

import pytest

from antiphon.config.tools import WebSearchSettings
from antiphon.tools.hosted.registry import HostedTools
from antiphon.tools.hosted.web_search.tool import WebSearchHostedTool
from support.live_server import LiveServer, make_settings
from support.threads import run_in_thread
from support.upstream_server import json_of, serve

URL = "https://cats.example.org/a"
RESULTS = {"results": [{"url": URL, "title": "Cats", "content": "Cats are small."}]}
TEXT = f"Cats are small ([Cats]({URL})). See [x](https://invented.example/)."
SCRIPT = {
    "native_tools": ["function"],
    "rules": [
        {"last_item": "function_call_output", "text": "Cats are small.", "answers": [TEXT]},
        {"answers": [[{"tool_call": {"name": "web_search", "arguments": {"query": "cats"}, "call_id": "call_1"}}]]},
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_in_thread(serve(fixed={"/search": json_of(RESULTS)})) as provider:
        settings = WebSearchSettings(provider="searxng", base_url=provider.url.removesuffix("/v1"))
        live = LiveServer(SCRIPT, make_settings(), hosted_tools=HostedTools([WebSearchHostedTool(settings)]))
        yield live
        live.stop()


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "web_search_2025_08_26"])
def test_answer_cites_the_pages_that_were_found(server: LiveServer, kind: Any) -> None:
    with server.client().responses.stream(model="scripted", input="cats?", tools=[{"type": kind}]) as stream:
        events = list(stream)
        response = stream.get_final_response()
    search, message = response.output
    assert (search.type, search.status, search.action.query) == ("web_search_call", "completed", "cats")
    assert search.action.sources is None
    (part,) = message.content
    (citation,) = part.annotations
    assert (citation.type, citation.url, citation.title) == ("url_citation", URL, "Cats")
    assert part.text == TEXT
    assert part.text[citation.start_index : citation.end_index] == f"([Cats]({URL}))"
    assert sum(event.type == "response.output_text.annotation.added" for event in events) == 1
    began = events[0].response.to_dict()["tool_usage"]  # type: ignore[union-attr]
    ended = response.to_dict()["tool_usage"]
    assert (began["web_search"], ended["web_search"]) == ({"num_requests": 0}, {"num_requests": 1})
    assert began["image_gen"] == ended["image_gen"]


def test_sources_are_shown_if_they_are_included(server: LiveServer) -> None:
    client = server.client()
    included: Any = ["web_search_call.action.sources", "web_search_call.results"]
    shown = client.responses.create(model="scripted", input="x", tools=[{"type": "web_search"}], include=included)
    bare = client.responses.retrieve(shown.id)
    again = client.responses.retrieve(shown.id, include=included)
    assert [source.url for source in shown.output[0].action.sources] == [URL]
    assert (bare.output[0].action.sources, "results" in bare.output[0].to_dict()) == (None, False)
    assert again.output[0].to_dict() == shown.output[0].to_dict()


def test_sources_are_shown_to_followers_if_they_are_included(server: LiveServer) -> None:
    client = server.client()
    included: Any = ["web_search_call.action.sources"]
    response = client.responses.create(
        model="scripted", input="x", tools=[{"type": "web_search"}], background=True, include=included
    )
    shown = client.responses.retrieve(response.id, stream=True, include=included)
    bare = client.responses.retrieve(response.id, stream=True)
    (shown_end,) = (event for event in shown if event.type == "response.completed")
    (bare_end,) = (event for event in bare if event.type == "response.completed")
    assert [source.url for source in shown_end.response.output[0].action.sources] == [URL]
    assert bare_end.response.output[0].action.sources is None
