"""Every struct of the protocol survives encoding and decoding."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, inspect

from antiphon.protocol import codec, content, events, hosted, items, request, response, tools
from antiphon.protocol.unions import OpenUnion, Unknown
from support import strategies

UNIONS = {
    "items": items.ITEMS,
    "parts": content.PARTS,
    "annotations": content.ANNOTATIONS,
    "tools": tools.TOOLS,
    "choices": tools.CHOICES,
    "events": codec.EVENTS,
}
MEMBERS = [(name, tag) for name, union in UNIONS.items() for tag in union.members]


@pytest.mark.parametrize(("union", "tag"), MEMBERS)
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_union_member_round_trips(union: str, tag: str, data: st.DataObject) -> None:
    value = data.draw(strategies.instances(UNIONS[union].members[tag]))
    assert UNIONS[union].decode(codec.encode(value)) == value


@pytest.mark.parametrize("name", UNIONS)
@given(data=st.data())
def test_mixed_list_round_trips(name: str, data: st.DataObject) -> None:
    union: OpenUnion[Any] = UNIONS[name]
    values = data.draw(st.lists(strategies.members(union), max_size=4))
    assert union.decode_list(codec.encode(values)) == values


@given(strategies.responses())
def test_response_round_trips(value: response.Response) -> None:
    assert codec.decode_response(codec.encode(value)) == value


@given(strategies.requests())
def test_request_round_trips(value: request.CreateRequest) -> None:
    assert codec.decode_request(codec.encode(value)) == codec.Decoded(value)


@given(strategies.all_events())
def test_event_round_trips(value: events.Event | Unknown) -> None:
    assert codec.decode_event(codec.encode(value)) == value


@given(st.lists(strategies.all_items(), max_size=4))
def test_items_round_trip(values: list[Any]) -> None:
    assert codec.decode_items(codec.encode(values)) == values


@given(strategies.all_events())
def test_encode_into_buffer_gives_same_bytes(value: events.Event | Unknown) -> None:
    buffer = bytearray(b"data: ")
    codec.encode_into(value, buffer, 6)
    assert bytes(buffer) == b"data: " + codec.encode(value)


@given(strategies.unknowns())
def test_unknown_object_round_trips_byte_for_byte_at_every_level(unknown: Unknown) -> None:
    raw = unknown.raw
    template = (
        b'{"input":[%b,{"type":"message","role":"user","content":[%b,{"type":"output_text","text":"","annotations":[%b]}'
        b']},{"type":"function_call_output","output":[%b]}],"tools":[%b,{"type":"namespace","name":"n","description":"",'
        b'"tools":[%b]}],"tool_choice":%b}'
    )
    body = template % ((raw,) * 7)
    assert codec.encode(codec.decode_request(body).body) == body


@given(strategies.unknowns())
def test_unknown_object_round_trips_byte_for_byte_in_events(unknown: Unknown) -> None:
    position = b'"sequence_number":1,"item_id":"","output_index":0,"content_index":0'
    bodies = [
        b"%b",
        b'{"type":"response.output_item.done","sequence_number":1,"output_index":0,"item":%b}',
        b'{"type":"response.content_part.added",' + position + b',"part":%b}',
        b'{"type":"response.output_text.annotation.added",' + position + b',"annotation_index":0,"annotation":%b}',
    ]
    encoded = [codec.encode(codec.decode_event(body % unknown.raw)) for body in bodies]
    assert encoded == [body % unknown.raw for body in bodies]


def all_structs(base: type[Struct]) -> set[type[Struct]]:
    return {base}.union(*(all_structs(child) for child in base.__subclasses__()))


def test_every_raw_field_declares_its_union() -> None:
    modules = {module.__name__ for module in (content, events, hosted, items, request, response, tools)}
    structs = [struct for struct in all_structs(Struct) if struct.__module__ in modules]
    undeclared = {
        (struct, field.name)
        for struct in structs
        for field in msgspec.structs.fields(struct)
        if isinstance(inspect.type_info(field.type), inspect.RawType)
    }
    assert undeclared == set()
