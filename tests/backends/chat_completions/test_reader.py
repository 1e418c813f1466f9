"""The reader when a server sends what nobody has foreseen: it fails in an orderly way, or not at all."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Delta, Finish, Reasoning, Text, TokenUsage, ToolCall
from antiphon.stream.sse import SseMessage
from support.damage import read_objects, replay_damaged
from support.replay import replay

CORPUS = Path(__file__).parents[2] / "wire" / "chat"
STATEFUL = Quirks(keep_call_extras=True, reasoning_field="reasoning_details")


def make_reader() -> ChatReader:
    return ChatReader(STATEFUL, estimate=lambda _: Usage(0, 0, 0))


CHUNKS = read_objects(CORPUS)


@settings(max_examples=100)
@given(st.data())
def test_damaged_stream_ends_in_one_terminal_event(data: st.DataObject) -> None:
    assert len(replay_damaged(CHUNKS, make_reader, data)) == 1


DEEP = b'{"error":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NO_TEXT = b'{"choices":[{"delta":{"content":"\xff"}}]}'


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe", b"null", b"7", b'"text"', b"[]", b'{"choices": 7}', b"{", b"[DONE", NO_TEXT, DEEP],
    ids=lambda data: repr(data[:20]),
)
def test_invalid_chunk_is_an_error(data: bytes) -> None:
    with pytest.raises(UpstreamError):
        make_reader().read(SseMessage(None, data))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"type":"ping"}', b'{"choices":null}', b'{"choices":[{}]}'])
def test_keepalive_yields_no_delta(data: bytes) -> None:
    assert list(make_reader().read(SseMessage(None, data))) == []


@pytest.mark.parametrize(
    "delta",
    [
        {"content": ["a"]},
        {"content": [{"type": "text", "text": "a"}, None]},
        {"content": "a", "tool_calls": [None]},
        {"content": "a", "refusal": {}, "annotations": {}, "reasoning_details": "b"},
    ],
)
def test_text_arrives_despite_malformed_fields(delta: Any) -> None:
    deltas = make_reader().read(SseMessage(None, json.dumps({"choices": [{"delta": delta}]}).encode()))
    assert list(deltas) == [Text("a")]


def test_plain_text_error_event_is_raised() -> None:
    with pytest.raises(AntiphonError) as caught:
        make_reader().read(SseMessage("error", b"out of memory"))
    assert caught.value.message == "The upstream failed: out of memory"


def test_call_extra_content_is_stored_at_any_position() -> None:
    """Gemini sends a signature with its call, or in a piece of its own after it."""
    reader = make_reader()
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    late = {"index": 0, "extra_content": {"google": {"thought_signature": "s"}}}
    deltas: list[Delta] = []
    for piece in (call, late):
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [{"delta": {"tool_calls": [piece]}}]}).encode()))
    deltas += reader.read(SseMessage(None, b"[DONE]"))
    assert [type(delta).__name__ for delta in deltas] == ["ToolCall", "ReasoningSeal", "TokenUsage", "Finish"]


def test_text_after_a_call_is_a_new_message() -> None:
    reader = make_reader()
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    pieces: list[Any] = [
        {"content": "<"},
        {"tool_calls": [call]},
        {"content": "\n"},
        {"content": "b"},
        {"reasoning": "c"},
    ]
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [{"delta": piece}]}).encode()))
    deltas += reader.read(SseMessage(None, b"[DONE]"))
    usage = TokenUsage(Usage(0, 0, 0))
    assert deltas == [Text("<"), ToolCall(0, "{}", "f", "a"), Text("\nb"), Reasoning("c"), usage, Finish("stop")]
    assert reader.finished


def test_long_call_in_small_parts_takes_linear_time() -> None:
    reader = make_reader()
    first = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"text":"'}}
    reader.read(SseMessage(None, json.dumps({"choices": [{"delta": {"tool_calls": [first]}}]}).encode()))
    piece = SseMessage(None, b'{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"abcd"}}]}}]}')
    begun = time.process_time()
    for _ in range(200_000):
        reader.read(piece)
    assert time.process_time() - begun < 8


def test_finish_reason_completes_an_answer_without_calls() -> None:
    content = {"content": "a"}
    call = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    is_complete = []
    for delta in (content, call):
        for reason in (None, "stop"):
            reader = make_reader()
            chunk = {"choices": [{"delta": delta, "finish_reason": reason}]}
            reader.read(SseMessage(None, json.dumps(chunk).encode()))
            is_complete.append(reader.is_complete)
    assert is_complete == [False, True, False, False]


def make_call(call_id: str, arguments: str, reason: str | None = None) -> bytes:
    call = {"index": ord(call_id), "id": call_id, "function": {"name": "f", "arguments": arguments}}
    choice = {"delta": {"tool_calls": [call]}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("chunks", "status", "calls"),
    [
        ([make_call("b", '{"x":')], "failed", ["completed", "incomplete"]),
        ([make_call("b", "")], "failed", ["completed", "incomplete"]),
        ([make_call("b", '{"x":'), make_call("c", "{}")], "failed", ["completed", "incomplete", "incomplete"]),
        ([make_call("b", '{"x":'), b"data: [DONE]\n\n"], "completed", ["completed", "completed"]),
        ([make_call("b", '{"x":', "stop")], "completed", ["completed", "completed"]),
        ([make_call("b", '{"x":', "length")], "incomplete", ["completed", "incomplete"]),
        ([make_call("b", "{}")], "completed", ["completed", "completed"]),
        ([make_call("a", "")], "completed", ["completed"]),
    ],
)
def test_stream_closed_within_a_later_call_is_broken(chunks: list[bytes], status: str, calls: list[str]) -> None:
    """Invalid arguments alone do not break the stream: the server then sends another reason, or the end."""
    response = replay(make_reader, [make_call("a", "{}", "tool_calls"), *chunks])[-1]["response"]
    assert (response["status"], [item["status"] for item in response["output"]]) == (status, calls)


def test_deeply_nested_arguments_are_passed_unchanged() -> None:
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    reader = make_reader()
    deltas: list[Delta] = []
    for piece in ({"name": "f", "arguments": deep}, {"name": "f", "arguments": " "}):
        chunk = {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "a", "function": piece}]}}]}
        deltas += reader.read(SseMessage(None, json.dumps(chunk).encode()))
    assert deltas == [ToolCall(0, deep, "f", "a"), ToolCall(0, " ", "", "a")]
