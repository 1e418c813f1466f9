"""Ends of output items: their status, and ends that have the index of another item."""

import json
from typing import Any

import pytest

from antiphon.backends.responses.reader import ResponsesReader
from antiphon.stream import deltas as d
from antiphon.stream.sse import SseMessage

MESSAGE = {"type": "message", "role": "assistant", "content": []}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def read_events(*events: Any) -> list[Any]:
    reader = ResponsesReader()
    return [delta for event in events for delta in reader.read(SseMessage(None, json.dumps(event).encode()))]


def done(item: dict[str, Any], output_index: int) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": output_index, "item": item}


def say(text: str) -> dict[str, Any]:
    return MESSAGE | {"content": [{"type": "output_text", "text": text}]}


@pytest.mark.parametrize("item", [MESSAGE, {"type": "reasoning", "summary": []}])
@pytest.mark.parametrize(
    ("status", "final"),
    [("in_progress", "completed"), ("completed", "completed"), ("incomplete", "incomplete"), (None, None)],
)
def test_item_without_content_has_a_final_status(item: dict[str, Any], status: str | None, final: str | None) -> None:
    (whole,) = read_events(done(item | {"status": status}, 0))
    assert whole.item.status == (final or ("completed" if item is MESSAGE else None))


def test_message_done_at_the_next_index_ends_the_message_with_its_text() -> None:
    text = {"type": "response.output_text.delta", "output_index": 0, "delta": "a"}
    emitted = read_events(text, done(say("a"), 1), text | {"output_index": 1}, done(say("ab"), 2))
    assert emitted == [d.Text("a"), d.CloseItem(), d.Text("a"), d.CloseItem(), d.Text("ab"), d.CloseItem()]


@pytest.mark.parametrize(("call_id", "names"), [("c", ["f"]), ("k", ["f", "f"])])
def test_call_done_at_the_next_index_ends_the_call_with_its_call_id(call_id: str, names: list[str]) -> None:
    added = {"type": "response.output_item.added", "output_index": 0, "item": CALL | {"arguments": ""}}
    arguments = {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": "{}"}
    emitted = read_events(added, arguments, done(CALL | {"call_id": call_id}, 1))
    assert [delta.name for delta in emitted if isinstance(delta, d.ToolCall) and delta.name] == names
