"""The reader when a server sends what nobody has foreseen: it fails in an orderly way, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Delta, Finish, Reasoning, Text, Tokens, ToolCall
from antiphon.stream.sse import Decoder, Message
from replay import replay

CORPUS = Path(__file__).parents[2] / "wire" / "chat"
KEEPING = Quirks(keep_call_extras=True, reasoning_field="reasoning_details")


def make_reader() -> ChatReader:
    return ChatReader(KEEPING, estimate=lambda _: Usage(0, 0, 0))


def read_chunks(path: Path) -> list[Any]:
    decoder = Decoder()
    messages = decoder.feed(path.read_bytes()) + decoder.close()
    return [json.loads(message.data) for message in messages if message.data.startswith((b'{"', b"[{"))]


CHUNKS = [chunk for path in sorted(CORPUS.glob("*.sse")) for chunk in read_chunks(path)]


def damage(value: Any, draw: Any) -> Any:
    """The value with something within it replaced by something else."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value)))
        return value | {name: damage(value[name], draw)}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [damage(value[0], draw), *value[1:]]
    return draw(strategies.json_values())


@settings(max_examples=100)
@given(st.data())
def test_a_damaged_stream_ends_in_one_terminal_event(data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.sampled_from(CHUNKS), max_size=4))
    damaged = [damage(chunk, data.draw) for chunk in chunks]
    raw = b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in [*damaged, *chunks])
    events = replay(make_reader, [raw + b"data: [DONE]\n\n"])
    final = [event for event in events if "response" in event and event["response"]["status"] != "in_progress"]
    assert len(final) == 1


DEEP = b'{"error":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NO_TEXT = b'{"choices":[{"delta":{"content":"\xff"}}]}'


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe", b"null", b"7", b'"text"', b"[]", b'{"choices": 7}', b"{", b"[DONE", NO_TEXT, DEEP],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_chunk_is_an_error(data: bytes) -> None:
    with pytest.raises(UpstreamError):
        make_reader().read(Message(None, data))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"type":"ping"}', b'{"choices":null}', b'{"choices":[{}]}'])
def test_a_sign_of_life_says_nothing(data: bytes) -> None:
    assert list(make_reader().read(Message(None, data))) == []


def test_an_error_event_in_plain_words_is_told() -> None:
    with pytest.raises(AntiphonError) as caught:
        make_reader().read(Message("error", b"out of memory"))
    assert caught.value.message == "The upstream failed: out of memory"


def test_a_call_takes_its_extras_along_wherever_they_come() -> None:
    """Gemini sends a signature with its call, or in a piece of its own after it."""
    reader = make_reader()
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    late = {"index": 0, "extra_content": {"google": {"thought_signature": "s"}}}
    told: list[Delta] = []
    for piece in (call, late):
        told += reader.read(Message(None, json.dumps({"choices": [{"delta": {"tool_calls": [piece]}}]}).encode()))
    told += reader.read(Message(None, b"[DONE]"))
    assert [type(delta).__name__ for delta in told] == ["ToolCall", "ReasoningSeal", "Tokens", "Finish"]


def test_text_after_a_call_is_a_message_of_its_own() -> None:
    reader = make_reader()
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    pieces: list[Any] = [
        {"content": "<"},
        {"tool_calls": [call]},
        {"content": "\n"},
        {"content": "b"},
        {"reasoning": "c"},
    ]
    told: list[Delta] = []
    for piece in pieces:
        told += reader.read(Message(None, json.dumps({"choices": [{"delta": piece}]}).encode()))
    told += reader.read(Message(None, b"[DONE]"))
    usage = Tokens(Usage(0, 0, 0))
    assert told == [Text("<"), ToolCall(0, "{}", "f", "a"), Text("\nb"), Reasoning("c"), usage, Finish("stop")]
    assert reader.finished
