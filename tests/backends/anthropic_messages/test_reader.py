"""Translation of event streams: recorded ones, read whole and cut at every byte, and damaged ones."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from antiphon.backends.anthropic_messages.reader import MessagesReader
from antiphon.errors import Unavailable, UpstreamError
from antiphon.protocol.response import Usage
from antiphon.stream import deltas
from antiphon.stream.sse import SseMessage
from support.damage import read_objects, replay_damaged
from support.replay import cut, find_harmful_cuts, replay

WIRE = Path(__file__).parents[2] / "wire" / "anthropic"
STREAMS = sorted(path.stem for path in WIRE.glob("*.sse"))


def make_reader() -> MessagesReader:
    return MessagesReader({})


def read_all(raw: bytes, *, names: dict[str, str] | None = None) -> list[deltas.Delta]:
    return list(MessagesReader(names or {}).read(SseMessage(None, raw)))


def read_result(events: list[dict[str, Any]]) -> dict[str, Any]:
    response = events[-1]["response"]
    return {key: response[key] for key in ("status", "incomplete_details", "error", "output", "usage")}


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_stream_gives_recorded_response(name: str) -> None:
    events = replay(make_reader, [(WIRE / f"{name}.sse").read_bytes()])
    assert read_result(events) == json.loads((WIRE / f"{name}.json").read_text())


@pytest.mark.parametrize("name", STREAMS)
def test_stream_cut_at_any_byte_gives_same_events(name: str) -> None:
    raw = (WIRE / f"{name}.sse").read_bytes()
    assert find_harmful_cuts(raw) == []
    assert replay(make_reader, cut(raw, *range(1, len(raw)))) == replay(make_reader, [raw])


def test_thinking_is_sealed_before_the_next_item() -> None:
    reader = make_reader()
    emitted = _read(reader, (WIRE / "interleaved_thinking.sse").read_bytes())
    assert [type(delta).__name__ for delta in emitted] == [
        "Reasoning", "ReasoningSeal", "ToolCall", "ToolCall",
        "Reasoning", "ReasoningSeal", "ToolCall", "ToolCall", "TokenUsage", "Finish",
    ]  # fmt: skip
    assert [json.loads(delta.encrypted_content) for delta in emitted if isinstance(delta, deltas.ReasoningSeal)] == [
        [{"type": "thinking", "thinking": "Two cities.", "signature": "sig-a"}],
        [
            {"type": "thinking", "thinking": "And the other.", "signature": "sig-b"},
            {"type": "redacted_thinking", "data": "EmwKAhgBEgy3"},
        ],
    ]


def _read(reader: MessagesReader, raw: bytes) -> list[deltas.Delta]:
    messages = [SseMessage(None, line[6:]) for line in raw.splitlines() if line.startswith(b"data: ")]
    return [delta for message in messages for delta in reader.read(message)]


def test_tool_name_is_restored() -> None:
    body = b'{"type":"message","content":[{"type":"tool_use","id":"toolu_1","name":"a_b_1234","input":{"x": 1.0}}]}'
    assert read_all(body, names={"a_b_1234": "a.b"})[:2] == [
        deltas.ToolCall(0, name="a.b", call_id="toolu_1"),
        deltas.ToolCall(0, '{"x": 1.0}'),
    ]


def test_unstreamed_answer_becomes_deltas() -> None:
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}},
        ],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 5, "output_tokens": 7},
    }
    emitted = read_all(json.dumps(message).encode())
    sealed = '[{"type":"thinking","thinking":"Hm.","signature":"s"}]'
    assert emitted[:-2] == [
        deltas.Reasoning("Hm."),
        deltas.ReasoningSeal(sealed),
        deltas.Text("Looking."),
        deltas.ToolCall(2, name="look", call_id="toolu_1"),
        deltas.ToolCall(2, "{}"),
    ]
    assert isinstance(emitted[-2], deltas.TokenUsage)
    assert emitted[-1] == deltas.Finish("stop")


def test_overloaded_error_is_raised_as_unavailable() -> None:
    with pytest.raises(Unavailable, match="Overloaded"):
        _read(make_reader(), (WIRE / "overloaded.sse").read_bytes())


def test_error_message_is_redacted() -> None:
    body = b'{"type":"error","error":{"type":"api_error","message":"bad key abcdef"}}'
    with pytest.raises(UpstreamError, match=r"bad key \*\*\*"):
        MessagesReader({}, secrets=["abcdef"]).read(SseMessage("error", body))


def test_stream_without_stop_reason_is_upstream_error() -> None:
    reader = make_reader()
    _read(reader, (WIRE / "broken_off.sse").read_bytes())
    with pytest.raises(UpstreamError, match="before the answer ended"):
        reader.end()


def test_message_that_starts_again_before_its_first_block_is_read() -> None:
    start, rest = (WIRE / "broken_off.sse").read_bytes().split(b"\n\n", 1)
    once = _read(make_reader(), b"\n\n".join((start, rest)))
    assert once
    assert _read(make_reader(), b"\n\n".join((start, start, rest))) == once


def test_message_that_starts_again_does_not_end_for_the_reason_of_the_first_one() -> None:
    reader = make_reader()
    raw = (WIRE / "broken_off.sse").read_bytes()
    start = raw.split(b"\n\n", 1)[0] + b"\n\n"
    end = b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":0}}\n\n'
    _read(reader, start + end + raw)
    with pytest.raises(UpstreamError, match="before the answer ended"):
        reader.end()


def test_second_message_in_one_answer_is_upstream_error() -> None:
    reader = make_reader()
    _read(reader, (WIRE / "broken_off.sse").read_bytes())
    with pytest.raises(UpstreamError, match="started a second message"):
        _read(reader, b'data: {"type":"message_start","message":{"content":[]}}\n\n')


@pytest.mark.parametrize("data", [b"not json", b'{"type":"content_block_delta","index":"one"}', b"\xff\xfe{}"])
def test_invalid_event_is_upstream_error(data: bytes) -> None:
    with pytest.raises(UpstreamError, match="invalid event"):
        make_reader().read(SseMessage(None, data))


OBJECTS = read_objects(WIRE)


@given(st.data())
def test_damaged_stream_ends_in_one_terminal_event(data: st.DataObject) -> None:
    assert len(replay_damaged(OBJECTS, make_reader, data)) == 1


@pytest.mark.parametrize(
    "lines",
    [
        [b'data: {"type":"message_stop"}'],
        [b'data: {"type":"message_start","message":{"content":[]}}', b'data: {"type":"message_stop"}'],
        [b'data: {"type":"message","content":null}'],
    ],
)
def test_answer_without_output_or_stop_reason_is_error(lines: list[bytes]) -> None:
    with pytest.raises(UpstreamError, match="without any output"):
        _read(make_reader(), b"\n".join(lines))


def test_announced_call_that_is_missing_is_error() -> None:
    with pytest.raises(UpstreamError, match="announced tool calls but sent none"):
        read_all(b'{"type":"message","content":[],"stop_reason":"tool_use"}')


@pytest.mark.parametrize(
    ("block", "call_id", "arguments"),
    [
        ({"id": "t", "input": {"a": 1}}, "t", '{"a": 1}'),
        ({"id": "t", "input": '{"a":1}'}, "t", '{"a":1}'),
        ({"id": "t", "input": ""}, "t", "{}"),
        ({"id": "t", "input": None}, "t", "{}"),
        ({"id": 7}, "7", "{}"),
        ({"id": None}, None, "{}"),
    ],
    ids=["object", "text", "empty text", "null", "number as id", "no id"],
)
def test_call_is_read_in_every_form(block: dict[str, Any], call_id: str | None, arguments: str) -> None:
    content = [{"type": "tool_use", "name": "f"} | block]
    emitted = read_all(json.dumps({"type": "message", "content": content, "stop_reason": "tool_use"}).encode())
    assert emitted == [
        deltas.ToolCall(0, name="f", call_id=call_id),
        deltas.ToolCall(0, arguments),
        deltas.Finish("stop"),
    ]


@pytest.mark.parametrize("block", [{}, {"content_block": None}, {"content_block": {"type": "text"}}])
def test_text_arrives_after_a_malformed_block_start(block: dict[str, Any]) -> None:
    start = json.dumps({"type": "content_block_start", "index": 0} | block).encode()
    delta = b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}'
    assert _read(make_reader(), b"data: " + start + b"\n" + delta) == [deltas.Text("Hi")]


def test_two_calls_with_one_index_stay_separate() -> None:
    start = b'data: {"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"%b","name":"f"}}'
    assert _read(make_reader(), b"\n".join([start % b"a", start % b"b"])) == [
        deltas.ToolCall(0, name="f", call_id="a"),
        deltas.ToolCall(0, "{}"),
        deltas.ToolCall(1, name="f", call_id="b"),
    ]


@pytest.mark.parametrize("usage", [b'{"input_tokens":"many"}', b"[]", b"null", b'{"input_tokens":-1}'])
def test_invalid_token_counts_do_not_fail_the_answer(usage: bytes) -> None:
    start = b'data: {"type":"message_start","message":{"content":null,"usage":%b}}' % usage
    text = b'data: {"type":"content_block_delta","index":null,"delta":{"type":"text_delta","text":"a"}}'
    end = b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}}'
    emitted = _read(make_reader(), b"\n".join([start, text, end, b'data: {"type":"message_stop"}']))
    assert emitted == [deltas.Text("a"), deltas.TokenUsage(Usage(0, 2, 2)), deltas.Finish("stop")]


# Recordings with events that no version of the API sends.
STRANGE = {
    "error_in_words",
    "error_without_a_name",
    "error_without_type",
    "index_missing",
    "index_missing_in_deltas",
    "strange_lines",
    "unknown_reason",
}


@functools.cache
def official_events() -> TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


@pytest.mark.parametrize("name", sorted(set(STREAMS) - STRANGE))
def test_recorded_events_match_official_types(name: str) -> None:
    raw = (WIRE / f"{name}.sse").read_bytes()
    for line in raw.splitlines():
        if line.startswith(b"data: ") and not line.startswith((b'data: {"type":"ping"', b'data: {"type":"error"')):
            official_events().validate_json(line.removeprefix(b"data: "))


@pytest.mark.parametrize(
    "delta",
    [
        {"type": "input_json_delta", "partial_json": ""},
        {"type": "thinking_delta", "thinking": ""},
        {"type": "signature_delta", "signature": ""},
        {"type": "text_delta", "text": ""},
        {"type": "hum_delta", "hum": "hm"},
    ],
)
def test_empty_delta_needs_no_open_block(delta: dict[str, str]) -> None:
    reader = make_reader()
    event = {"type": "content_block_delta", "index": 3, "delta": delta}
    assert list(reader.read(SseMessage(None, json.dumps(event).encode()))) == []


def test_stop_reason_concludes_the_answer() -> None:
    reader = make_reader()
    _read(reader, (WIRE / "broken_off.sse").read_bytes())
    assert not reader.is_complete
    reader.read(SseMessage(None, b'{"type":"message_delta","delta":{"stop_reason":"end_turn"}}'))
    assert reader.is_complete
