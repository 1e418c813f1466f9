"""The stream helper of the OpenAI SDK for Python, which checks the events that it reads, on streams of any kind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from openai import APIError, BaseModel, OpenAI

from antiphon.backends.base import Turn
from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.backends.scripted.script import Script
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.deltas import Delta
from support.live_server import LiveServer, make_settings
from support.turns import borders, calls, endings, texts

Json = dict[str, Any]
# Fields that the helper adds.
_PARSED = {"parsed", "parsed_arguments"}


class DeltaBackend(ScriptedBackend):
    """A backend that sends given batches of deltas."""

    def __init__(self) -> None:
        super().__init__("scripted", Script())
        self.batches: Sequence[Sequence[Delta]] = ()

    async def stream(self, turn: Turn) -> AsyncIterator[Sequence[Delta]]:  # type: ignore[override]
        return self._send()

    async def _send(self) -> AsyncIterator[Sequence[Delta]]:
        for batch in self.batches:
            yield batch
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def backend() -> DeltaBackend:
    return DeltaBackend()


@pytest.fixture(scope="module")
def server(backend: DeltaBackend) -> Iterator[LiveServer]:
    running = LiveServer({}, make_settings(), backend=backend)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> OpenAI:
    return server.client()


def read_json(response: BaseModel) -> Any:
    return remove_parsed(response.to_dict(warnings=False))


def remove_parsed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: remove_parsed(each) for name, each in value.items() if name not in _PARSED}
    return [remove_parsed(each) for each in value] if isinstance(value, list) else value


def suits_helper(delta: Delta) -> bool:
    """Return True unless the delta fails most responses, or the helper warns about it: unnamed calls, unknown types."""
    if isinstance(delta, d.ToolCall | d.CustomToolCall):
        return bool(delta.name)
    return not isinstance(getattr(delta, "annotation", getattr(delta, "event", None)), Unknown)


batches = st.lists(st.lists(texts | calls | borders, max_size=8).map(lambda batch: [*filter(suits_helper, batch)]))


@given(batches, endings)
def test_helper_accumulates_the_stored_response(
    server: LiveServer, client: OpenAI, backend: DeltaBackend, turn: list[list[Delta]], ending: Delta
) -> None:
    backend.batches = [[d.Text("a")], *turn, [ending]]  # a failure without text is an HTTP error, not a stream
    events: list[Any] = []
    with client.responses.stream(model="scripted", input="hi") as stream, contextlib.suppress(APIError):
        events += stream  # one by one: an `error` event raises
    stored: Json = server.ask("GET", f"/v1/responses/{events[0].response.id}").json
    event(stored["status"])
    check_snapshots(events, stored["output"])
    if stored["status"] == "failed":
        assert not events[-1].type.startswith("response.completed")
        return
    assert read_json(events[-1].response) == stored
    if stored["status"] == "completed":
        assert read_json(stream.get_final_response()) == stored


def check_snapshots(events: list[Any], output: list[Json]) -> None:
    """Check the text that the helper has accumulated with each delta against the final items."""
    snapshots: dict[tuple[int, int], str] = {}
    for each in events:
        if each.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            snapshots[each.output_index, getattr(each, "content_index", 0)] = each.snapshot
    expected: dict[tuple[int, int], str] = {}
    for index, item in enumerate(output):
        if item["type"] == "function_call" and item["arguments"]:
            expected[index, 0] = item["arguments"]
        elif item["type"] == "message":
            for position, part in enumerate(item["content"]):
                if part["type"] == "output_text" and part["text"]:
                    expected[index, position] = part["text"]
    assert {key: text for key, text in snapshots.items() if text} == expected
