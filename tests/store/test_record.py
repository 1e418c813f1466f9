import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import ServerError
from antiphon.offload import LARGE_BYTES
from antiphon.protocol import codec
from antiphon.protocol.items import Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import StoredResponse
from antiphon.store.encoded_response import EncodedResponse
from antiphon.store.record import (
    LinkRecord,
    pack_response,
    unpack_conversation,
    unpack_items,
    unpack_links,
    unpack_response,
)
from support import strategies

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
unknown_items = st.builds(
    lambda fields, indent, ascii_only: Unknown(
        json.dumps({**fields, "type": "hologram_call"}, indent=indent, ensure_ascii=ascii_only).encode(
            errors="backslashreplace"
        )
    ),
    st.dictionaries(st.text(alphabet="abc", min_size=1), json_values, max_size=3),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)


@given(st.lists(unknown_items, max_size=4), st.lists(unknown_items, max_size=4))
def test_record_contains_unknown_items_byte_for_byte(input_items: list[Unknown], output_items: list[Unknown]) -> None:
    stored = StoredResponse(
        response=Response(id="resp_1", created_at=1, model="m", output=list(output_items)), input=list(input_items)
    )
    record = pack_response(stored)
    assert unpack_response(record.id, record.expires_at, record.input, record.output, record.body) == stored


def test_record_contains_the_output_once() -> None:
    output = [Unknown(b'{"type":"hologram_call"}')]
    record = pack_response(
        StoredResponse(response=Response(id="resp_1", created_at=1, model="m", output=output), input=[])
    )
    assert (record.input, record.output) == (b"[]", b'[{"type":"hologram_call"}]')
    assert b"hologram_call" not in record.body


@pytest.mark.parametrize("damage", [b"", b"{", b"[{}]", b'"text"'])
def test_damaged_record_raises_a_server_error(damage: bytes) -> None:
    body = pack_response(StoredResponse(response=Response(id="resp_1", created_at=1, model="m"), input=[])).body
    for pieces in ((damage, b"[]", body), (b"[]", damage, body), (b"[]", b"[]", damage)):
        with pytest.raises(ServerError, match="The stored response resp_1 cannot be read"):
            unpack_response("resp_1", None, *pieces)
    with pytest.raises(ServerError, match="The stored response resp_1 cannot be read"):
        unpack_links([LinkRecord("resp_1", None, True, b"[]", damage, body, 9)])
    with pytest.raises(ServerError, match="The stored response resp_1 cannot be read"):
        unpack_links([LinkRecord("resp_1", None, True, b"[]", b"[]", damage, 9)])
    with pytest.raises(ServerError, match="The stored conversation conv_1 cannot be read"):
        unpack_items("conv_1", [damage + b"{"])
    with pytest.raises(ServerError, match="The stored conversation conv_1 cannot be read"):
        unpack_conversation("conv_1", 1, damage)


@given(strategies.instances(Response))
def test_parts_of_a_record_are_the_json_of_the_response(response: Response) -> None:
    stored = StoredResponse(response=response, input=[], encoded=EncodedResponse())
    pack_response(stored)
    assert stored.encoded is not None
    is_simple = response.error is None and not isinstance(response.instructions, list)
    assert stored.encoded.join(response) == (codec.encode(response) if is_simple else None)


def test_text_like_an_empty_output_is_not_replaced() -> None:
    text = '{"output":[]}'
    response = Response(
        id="resp_1",
        created_at=1,
        model=text,
        instructions=text,
        metadata={"output": "[]"},
        output=[Message("user", text)],
    )
    stored = StoredResponse(response=response, input=[], encoded=EncodedResponse())
    pack_response(stored)
    assert stored.encoded is not None
    assert stored.encoded.join(response) == codec.encode(response)


def test_large_response_is_not_joined() -> None:
    response = Response(id="resp_1", created_at=1, model="m", output=[Message("user", "x" * LARGE_BYTES)])
    stored = StoredResponse(response=response, input=[], encoded=EncodedResponse())
    pack_response(stored)
    assert stored.encoded is not None
    assert stored.encoded.join(response) is None


def test_response_that_was_not_encoded_is_not_joined() -> None:
    assert EncodedResponse().join(Response(id="resp_1", created_at=1, model="m")) is None
