"""Encoding and decoding of server-sent events, and the repair of split surrogates."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import UpstreamError
from antiphon.protocol.codec import decode_event, encode
from antiphon.protocol.content import LogProb, TopLogProb
from antiphon.protocol.events import (
    Completed,
    Created,
    Error,
    ErrorPayload,
    Event,
    Failed,
    Incomplete,
    InProgress,
    Lifecycle,
    OutputItemDone,
    OutputTextDelta,
    Queued,
    RefusalDelta,
)
from antiphon.protocol.response import Response
from antiphon.protocol.tool_lists import SharedTools
from antiphon.protocol.tools import FunctionTool
from antiphon.protocol.unions import Unknown
from antiphon.stream.sse import (
    _TEXT_EVENT_PREFIXES,
    DONE,
    MESSAGE_LIMIT,
    SseDecoder,
    SseMessage,
    SurrogateRepairer,
    encode_batch,
    encode_event,
    encode_start,
)


def text_delta(delta: str, number: int = 0) -> OutputTextDelta:
    return OutputTextDelta(
        sequence_number=number, item_id="msg_1", output_index=0, content_index=0, delta=delta, logprobs=[]
    )


def decode(*chunks: bytes, limit: int = MESSAGE_LIMIT) -> list[SseMessage]:
    decoder = SseDecoder(limit=limit)
    messages = [message for chunk in chunks for message in decoder.feed(chunk)]
    assert decoder.close() == []
    return messages


@st.composite
def chunked(draw: st.DrawFn, stream: st.SearchStrategy[bytes]) -> list[bytes]:
    """Return a stream in chunks, split at any positions. A position drawn twice gives an empty chunk."""
    whole = draw(stream)
    positions = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[start:end] for start, end in pairwise([0, *positions, len(whole)])]


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON_OBJECTS = st.dictionaries(
    ANY_TEXT, st.recursive(st.none() | st.integers() | ANY_TEXT, lambda inner: st.lists(inner, max_size=3)), max_size=4
)


@st.composite
def unknown_events(draw: st.DrawFn) -> Unknown:
    body = draw(JSON_OBJECTS) | {"type": "vendor." + draw(ANY_TEXT)}
    return Unknown(json.dumps(body, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2]))).encode())


EVENTS = st.one_of(
    st.builds(text_delta, ANY_TEXT, st.integers(0, 10**9)),
    st.builds(
        RefusalDelta,
        sequence_number=st.integers(0, 10**9),
        item_id=ANY_TEXT,
        output_index=st.integers(0, 9),
        content_index=st.integers(0, 9),
        delta=ANY_TEXT,
    ),
    st.builds(
        Error,
        sequence_number=st.integers(0, 10**9),
        error=st.builds(ErrorPayload, type=ANY_TEXT, code=st.none() | ANY_TEXT, message=ANY_TEXT, param=st.none()),
    ),
    unknown_events(),
)


class TestEncoding:
    def test_event_is_encoded_as_name_line_and_json_line(self) -> None:
        assert (
            encode_event(text_delta("Zürich\n", 7))
            == (
                "event: response.output_text.delta\n"
                'data: {"type":"response.output_text.delta","sequence_number":7,"item_id":"msg_1","output_index":0,'
                '"content_index":0,"delta":"Zürich\\n","logprobs":[]}\n\n'
            ).encode()
        )

    def test_unknown_event_is_encoded_with_name_and_unchanged_body(self) -> None:
        body = b'{"type": "vendor.news",  "n": 1.50}'
        assert encode_event(Unknown(body)) == b"event: vendor.news\ndata: " + body + b"\n\n"

    def test_multiline_body_is_encoded_on_one_line(self) -> None:
        assert encode_event(Unknown(b'{\r\n"type":"v"\n}')) == b'event: v\ndata: {  "type":"v" }\n\n'

    @pytest.mark.parametrize("body", [b'{"n":1}', rb'{"type":"a\ndata: forged"}', rb'{"type":"a\rb"}', b'{"type":""}'])
    def test_type_with_line_end_is_sent_without_event_line(self, body: bytes) -> None:
        assert encode_event(Unknown(body)) == b"data: " + body + b"\n\n"

    @given(st.lists(EVENTS, max_size=5))
    def test_batch_is_concatenation_of_events(self, events: list[Event | Unknown]) -> None:
        assert encode_batch(events) == b"".join(encode_event(event) for event in events)

    @given(st.lists(EVENTS, min_size=1, max_size=3))
    def test_start_is_encoded_like_any_batch(self, events: list[Event | Unknown]) -> None:
        assert encode_start(events) == encode_batch(events)

    @pytest.mark.parametrize("tools", [[], [Unknown(b'{"type":\n"vendor"}')], SharedTools([FunctionTool("f")])])
    def test_start_of_one_response_is_encoded_like_any_batch(self, tools: Any) -> None:
        response = Response(id="r", created_at=0, model="m", instructions="a\nb", tools=tools)
        for events in ([Created(0, response)], [Created(0, response), Queued(1, response), InProgress(2, response)]):
            assert encode_start(events) == encode_batch(events)

    @pytest.mark.parametrize("kind", _TEXT_EVENT_PREFIXES)
    def test_text_events_have_no_nested_json(self, kind: type[Event]) -> None:
        """A batch is encoded without a search for line ends in these events. Only an `Unknown` can contain them."""
        allowed = {str, int, float, str | None, list[LogProb], list[TopLogProb], list[int]}
        for each in (kind, LogProb, TopLogProb):
            assert {field.type for field in msgspec.structs.fields(each)} <= allowed

    def test_empty_batch_is_empty(self) -> None:
        assert encode_batch([]) == b""

    @given(EVENTS)
    def test_encoded_event_has_no_extra_line_ends(self, event: Event | Unknown) -> None:
        wire = encode_event(event)
        assert b"\r" not in wire
        assert wire.count(b"\n") == (3 if wire.startswith(b"event: ") else 2)

    @given(JSON_OBJECTS)
    def test_encoded_json_has_no_raw_line_end(self, body: dict[str, object]) -> None:
        assert not set(encode(body)) & set(b"\r\n")

    @given(chunked(st.lists(EVENTS, max_size=5).map(encode_batch)))
    def test_chunk_boundaries_do_not_change_messages(self, chunks: list[bytes]) -> None:
        assert decode(*chunks) == decode(b"".join(chunks))

    @given(st.lists(EVENTS, max_size=5))
    def test_encoded_events_round_trip(self, events: list[Event | Unknown]) -> None:
        messages = decode(encode_batch(events) + DONE)
        assert messages.pop() == SseMessage(None, b"[DONE]")
        assert [json.loads(message.data) for message in messages] == [json.loads(encode(event)) for event in events]
        known = [(event, message) for event, message in zip(events, messages, strict=True) if isinstance(event, Event)]
        assert [decode_event(message.data) for _, message in known] == [event for event, _ in known]
        assert [message.event for _, message in known] == [event.type for event, _ in known]


RECORDS = st.sampled_from(
    [
        b"data: {}\n\n",
        b'data: {"a": "\xc3\xbc"}\n\n',
        b"data: [DONE]\n\n",
        b"data: \n\n",
        b"data:  x\n\n",
        b"data:x\n\n",
        b"data\n\n",
        b"data: a\ndata: b\n\n",
        b"data: a\n",
        b"data: \xef\xbb\xbf\n\n",
        b"event: e\ndata: x\n\n",
        b"event: \ndata: x\n\n",
        b"event:  e\ndata:  x\n\n",
        b"event: \xff\ndata: x\n\n",
        b"event: e\ndata: \n\n",
        b"event: e\ndata: a\ndata: b\n\n",
        b"event: e\nid: 5\ndata: x\n\n",
        b"event: e\n\n",
        b"event: e\n",
        b": data: x\n\n",
        b"error: x\n\n",
        b"data: x\r\n\r\n",
        b"data: x\r\r",
        b"data: x\ry\n\n",
        b"\n",
        b"\n\n",
        b"data: " + b"x" * 40 + b"\n\n",
    ]
)


@given(st.lists(st.lists(RECORDS, max_size=4).map(b"".join), max_size=4), st.sampled_from([40, 64, 200]))
def test_chunk_of_whole_messages_decodes_like_single_bytes(chunks: list[bytes], limit: int) -> None:
    def decode_all(pieces: list[bytes]) -> list[SseMessage] | None:
        decoder = SseDecoder(limit=limit)
        try:
            return [message for piece in pieces for message in decoder.feed(piece)] + decoder.close()
        except UpstreamError:
            return None

    whole = b"".join(chunks)
    assert decode_all(chunks) == decode_all([whole[index : index + 1] for index in range(len(whole))])


LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))


NOISE = st.sampled_from([":", ": data: x", "id: 1", "retry: 5", "retry", "datum: x"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[SseMessage], bytes]:
    """Return messages and one of their valid encodings."""
    messages: list[SseMessage] = []
    wire = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    for _ in range(draw(st.integers(0, 4))):
        event = draw(st.none() | LINE.filter(bool))
        data = draw(st.lists(LINE, min_size=1, max_size=3))
        messages.append(SseMessage(event, "\n".join(data).encode()))
        lines = [f"data: {line}" for line in data]
        for extra in [*draw(st.lists(NOISE, max_size=3)), *([] if event is None else [f"event: {event}"])]:
            lines.insert(draw(st.integers(0, len(lines))), extra)
        for line in lines:
            wire += line.encode() + draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
        # After a CR, an LF would be read as the second half of CRLF.
        wire += draw(st.sampled_from([b"\r\n", b"\r"] if wire.endswith(b"\r") else [b"\n", b"\r\n", b"\r"]))
    return messages, wire


class TestDecoding:
    @pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
    def test_all_three_line_ends_are_accepted(self, end: bytes) -> None:
        wire = end.join([b"event: a", b"data: 1", b"", b"data: 2", b"", b""])
        assert decode(wire) == [SseMessage("a", b"1"), SseMessage(None, b"2")]

    def test_chunk_boundary_between_cr_and_lf_adds_no_line(self) -> None:
        assert decode(b"data: 1\r", b"", b"\ndata: 2\r", b"\n\r", b"\n") == [SseMessage(None, b"1\n2")]

    def test_message_is_returned_with_its_last_byte(self) -> None:
        decoder = SseDecoder()
        assert decoder.feed(b"data: 1\r\n\r") == [SseMessage(None, b"1")]
        assert decoder.feed(b"\n") == []
        assert decoder.feed(b"data: 2\n") == []
        assert decoder.feed(b"\n") == [SseMessage(None, b"2")]

    def test_single_byte_chunks_give_same_messages(self) -> None:
        wire = b"\xef\xbb\xbf" + 'event: grüße\r\n: note\ndata: "ü😀"\ndata\r\rdata: [DONE]\n\n'.encode()
        expected = [SseMessage("grüße", '"ü😀"\n'.encode()), SseMessage(None, b"[DONE]")]
        assert decode(wire) == expected
        assert decode(*(wire[index : index + 1] for index in range(len(wire)))) == expected

    def test_only_one_space_after_colon_is_removed(self) -> None:
        assert decode(b"data:a\n\ndata:  b\n\n") == [SseMessage(None, b"a"), SseMessage(None, b" b")]

    def test_message_without_data_is_ignored(self) -> None:
        assert decode(b"event: ping\n\nid: 3\n\n: note\n\n\n\ndata:\n\n") == [SseMessage(None, b"")]

    def test_empty_event_name_is_none(self) -> None:
        assert decode(b"event:\ndata: 1\n\n") == [SseMessage(None, b"1")]

    def test_byte_order_mark_is_skipped_only_at_start(self) -> None:
        mark = b"\xef\xbb\xbf"
        assert decode(mark + b"data: 1\n\n" + mark + b"data: 2\n\n") == [SseMessage(None, b"1")]

    def test_invalid_utf8_is_replaced_in_name_and_unchanged_in_data(self) -> None:
        assert decode(b"event: \xff\ndata: \xff\n\n") == [SseMessage("\ufffd", b"\xff")]

    @pytest.mark.parametrize("rest", [b"data: 1", b"data: 1\n", b"data: 1\r", b"\xef\xbb\xbfdata: 1"])
    def test_close_returns_unterminated_message(self, rest: bytes) -> None:
        decoder = SseDecoder()
        assert decoder.feed(rest) == []
        assert decoder.close() == [SseMessage(None, b"1")]

    @given(st.data())
    def test_any_encoding_and_chunking_gives_same_messages(self, data: st.DataObject) -> None:
        messages, wire = data.draw(streams())
        assert decode(*data.draw(chunked(st.just(wire)))) == messages


class TestLimit:
    WIRE = b"data: " + b"x" * 10 + b"\ndata: " + b"y" * 10 + b"\n\n"

    def test_message_at_limit_is_accepted_and_size_resets(self) -> None:
        decoder = SseDecoder(limit=32)
        expected = [SseMessage(None, b"x" * 10 + b"\n" + b"y" * 10)]
        assert decoder.feed(self.WIRE) == expected
        assert decoder.feed(self.WIRE) == expected

    @given(chunked(st.just(WIRE)))
    def test_message_over_limit_raises_for_any_chunking(self, chunks: list[bytes]) -> None:
        with pytest.raises(UpstreamError, match="larger than 31 bytes"):
            decode(*chunks, limit=31)

    @pytest.mark.parametrize("line", [b"x" * 32, b": " + b"x" * 30, b"event: " + b"x" * 25])
    def test_unterminated_line_over_limit_raises(self, line: bytes) -> None:
        decoder = SseDecoder(limit=31)
        with pytest.raises(UpstreamError, match="larger than 31 bytes"):
            decoder.feed(line)


def test_line_ends_in_unknown_item_are_removed() -> None:
    item = Unknown(b'{\n  "type": "acme:x",\r\n  "id": "x_1"\n}')
    encoded = encode_event(OutputItemDone(3, 0, item))
    assert encoded.count(b"\n") == 3
    assert json.loads(encoded.partition(b"data: ")[2])["item"] == {"type": "acme:x", "id": "x_1"}


@pytest.mark.parametrize(
    ("messages", "repaired"),
    [
        ([rb'"a\ud83d"', rb'"\ude00b"'], [rb'"a"', rb'"\ud83d\ude00b"']),
        ([rb'"a\uD83D"', rb'{"ping": 1}', rb'"\uDE00"'], [rb'"a"', rb'{"ping": 1}', rb'"\uD83D\uDE00"']),
        ([rb'"\ud83d\ude00"'], [rb'"\ud83d\ude00"']),
        ([rb'"\ud83d\ude00\ud83d"', rb'"\ude00"'], [rb'"\ud83d\ude00"', rb'"\ud83d\ude00"']),
        ([rb'"\ude00"', rb'"\ud83dx"'], [rb'"\ufffd"', rb'"\ufffdx"']),
        ([rb'"\ud83d"', rb'"x"', rb'"y"'], [rb'""', rb'"x"', rb'"y"']),
        ([rb'"\\ud83d"', rb'"\\ude00"'], [rb'"\\ud83d"', rb'"\\ude00"']),
        ([rb'"\\\ud83d"', rb'"\ude00"'], [rb'"\\"', rb'"\ud83d\ude00"']),
        ([rb'"\ud7ff"', rb'"\ue000"'], [rb'"\ud7ff"', rb'"\ue000"']),
    ],
)
def test_split_surrogate_pair_is_joined(messages: list[bytes], repaired: list[bytes]) -> None:
    repairer = SurrogateRepairer()
    assert [repairer.repair(message) for message in messages] == repaired


def test_message_without_surrogates_is_returned_unchanged() -> None:
    message = b'{"text": "\xf0\x9f\x98\x80 \\u0041"}'
    assert SurrogateRepairer().repair(message) is message


@pytest.mark.parametrize("kind", [Created, Queued, InProgress, Completed, Failed, Incomplete])
def test_event_with_shared_tools_is_encoded_like_any_other(kind: type[Lifecycle]) -> None:
    tools = [FunctionTool("f", "Add.", parameters={"type": "object"})]
    plain = kind(7, Response(id="resp_1", created_at=0, model="m", tools=tools))
    shared = kind(7, Response(id="resp_1", created_at=0, model="m", tools=SharedTools(tools)))
    before = shared.response
    assert [encode_event(shared) for _ in range(2)] == [encode_event(plain)] * 2
    assert shared.response is before
    assert type(before.tools) is SharedTools
