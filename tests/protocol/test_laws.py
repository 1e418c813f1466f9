"""What holds for every struct of the protocol, whatever is in it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, inspect

from antiphon.protocol import codec, content, events, hosted, items, request, response, tools
from antiphon.protocol.unions import OpenUnion, Unknown
from support import strategies

FAMILIES = {
    "items": items.ITEMS,
    "parts": content.PARTS,
    "annotations": content.ANNOTATIONS,
    "tools": tools.TOOLS,
    "choices": tools.CHOICES,
    "events": codec.EVENTS,
}
MEMBERS = [(name, tag) for name, family in FAMILIES.items() for tag in family.members]


@pytest.mark.parametrize(("family", "tag"), MEMBERS)
@settings(max_examples=15)
@given(data=st.data())
def test_a_member_decodes_to_what_was_encoded(family: str, tag: str, data: st.DataObject) -> None:
    value = data.draw(strategies.instances(FAMILIES[family].members[tag]))
    assert FAMILIES[family].decode(codec.encode(value)) == value


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30)
@given(data=st.data())
def test_a_mixed_list_decodes_to_what_was_encoded(name: str, data: st.DataObject) -> None:
    family: OpenUnion[Any] = FAMILIES[name]
    values = data.draw(st.lists(strategies.members(family), max_size=4))
    assert family.decode_list(codec.encode(values)) == values


@given(strategies.responses())
def test_a_response_decodes_to_what_was_encoded(value: response.Response) -> None:
    assert codec.decode_response(codec.encode(value)) == value


@given(strategies.requests())
def test_a_request_decodes_to_what_was_encoded(value: request.CreateRequest) -> None:
    assert codec.decode_request(codec.encode(value)) == codec.DecodedRequest(value)


@given(strategies.all_events())
def test_an_event_decodes_to_what_was_encoded(value: events.Event | Unknown) -> None:
    assert codec.decode_event(codec.encode(value)) == value


@given(st.lists(strategies.all_items(), max_size=4))
def test_items_decode_to_what_was_encoded(values: list[Any]) -> None:
    assert codec.decode_items(codec.encode(values)) == values


@given(strategies.all_events())
def test_encoding_into_a_buffer_gives_the_same_bytes(value: events.Event | Unknown) -> None:
    buffer = bytearray(b"data: ")
    codec.encode_into(value, buffer, 6)
    assert bytes(buffer) == b"data: " + codec.encode(value)


@given(strategies.unknowns())
def test_an_unknown_object_comes_back_byte_for_byte_at_every_level(unknown: Unknown) -> None:
    raw = unknown.raw
    template = (
        b'{"input":[%b,{"type":"message","role":"user","content":[%b,{"type":"output_text","text":"","annotations":[%b]}'
        b']},{"type":"function_call_output","output":[%b]}],"tools":[%b,{"type":"namespace","name":"n","description":"",'
        b'"tools":[%b]}],"tool_choice":%b}'
    )
    body = template % ((raw,) * 7)
    assert codec.encode(codec.decode_request(body).request) == body


@given(strategies.unknowns())
def test_an_unknown_object_comes_back_byte_for_byte_in_events(unknown: Unknown) -> None:
    place = b'"sequence_number":1,"item_id":"","output_index":0,"content_index":0'
    bodies = [
        b"%b",
        b'{"type":"response.output_item.done","sequence_number":1,"output_index":0,"item":%b}',
        b'{"type":"response.content_part.added",' + place + b',"part":%b}',
        b'{"type":"response.output_text.annotation.added",' + place + b',"annotation_index":0,"annotation":%b}',
    ]
    encoded = [codec.encode(codec.decode_event(body % unknown.raw)) for body in bodies]
    assert encoded == [body % unknown.raw for body in bodies]


def all_structs(base: type[Struct]) -> set[type[Struct]]:
    return {base}.union(*(all_structs(child) for child in base.__subclasses__()))


def test_every_open_field_says_what_it_holds() -> None:
    modules = {module.__name__ for module in (content, events, hosted, items, request, response, tools)}
    structs = [struct for struct in all_structs(Struct) if struct.__module__ in modules]
    silent = {
        (struct, field.name)
        for struct in structs
        for field in msgspec.structs.fields(struct)
        if isinstance(inspect.type_info(field.type), inspect.RawType)
    }
    assert silent == set()
