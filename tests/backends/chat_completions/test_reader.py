"""Reading of chunks: also malformed and unusual ones are read, or fail with a clear error."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Delta, Finish, Reasoning, Text, TokenUsage, ToolCall
from antiphon.stream.sse import SseMessage
from support.chat_reader import DEEP, make_reader
from support.damage import read_objects, replay_damaged
from support.replay import replay

CORPUS = Path(__file__).parents[2] / "wire" / "chat"
CHUNKS = read_objects(CORPUS)


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


@given(st.data())
def test_damaged_stream_ends_in_one_terminal_event(data: st.DataObject) -> None:
    assert len(replay_damaged(CHUNKS, make_reader, data)) == 1


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


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"choices":[null,{"delta":{"content":"a\tb"}}]}',
        b'{"choices":[{"index":"0","delta":{"content":"a\\tb"}}]}',
        b'{"choices":[{"delta":{"content":"a\\tb"},"logprobs":{"content":[{"token":"a","logprob":NaN}]}}]}',
        b'{"choices":[{"delta":{"content":"a\\tb"}}],"usage":{"prompt_tokens":-Infinity}}',
    ],
    ids=["control character", "number in a string", "NaN", "infinity"],
)
def test_damaged_chunk_is_read(chunk: bytes) -> None:
    assert [delta.text for delta in make_reader().read(SseMessage(None, chunk)) if isinstance(delta, Text)] == ["a\tb"]


@pytest.mark.parametrize("field", ["delta", "message"])
@pytest.mark.parametrize("name", ["tool_calls", "function_call"])
def test_damaged_arguments_of_a_call_are_refused(field: str, name: str) -> None:
    call = b'{"name":"pay","arguments":{"sum":NaN}}'
    calls = b'[{"id":"c","function":' + call + b"}]" if name == "tool_calls" else call
    chunk = b'{"choices":[{"%b":{"%b":%b}}]}' % (field.encode(), name.encode(), calls)
    with pytest.raises(UpstreamError, match="not a Chat Completions chunk"):
        list(make_reader().read(SseMessage(None, chunk)))


def test_damaged_chunk_with_error_is_error() -> None:
    with pytest.raises(UpstreamError, match="memory"):
        make_reader().read(SseMessage(None, b'{"error":{"message":"out\tof memory"},"choices":[]}'))


def test_plain_text_error_event_is_raised() -> None:
    with pytest.raises(AntiphonError) as caught:
        make_reader().read(SseMessage("error", b"out of memory"))
    assert caught.value.message == "The upstream failed: out of memory"


@pytest.mark.parametrize("marker", [b"[done]", b'"[DONE]"', b"done"])
def test_unreadable_data_after_finish_reason_is_ignored(marker: bytes) -> None:
    raw = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata: ' + marker + b"\n\n"
    assert replay(make_reader, [raw])[-1]["type"] == "response.completed"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "reasoning_text", "thinking"])
@pytest.mark.parametrize("value", ["why", [{"type": "text", "text": "why"}]])
def test_reasoning_is_read_from_every_known_field(name: str, value: Any) -> None:
    [delta] = make_reader().read(SseMessage(None, json.dumps({"choices": [{"delta": {name: value}}]}).encode()))
    assert delta == Reasoning("why")


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
    assert deltas == [
        Text("<"),
        ToolCall(0, "", "f", "a"),
        Text("\nb"),
        Reasoning("c"),
        ToolCall(0, "{}", "", "a"),
        TokenUsage(Usage(0, 0, 0)),
        Finish("stop"),
    ]
    assert reader.finished
