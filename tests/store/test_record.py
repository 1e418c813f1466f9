import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import ServerError
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store import record
from antiphon.store.base import StoredResponse
from antiphon.store.record import (
    LinkRecord,
    build_chain,
    pack_events,
    pack_response,
    unpack_conversation,
    unpack_events,
    unpack_items,
    unpack_response,
)

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


@settings(max_examples=50)
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
        build_chain("resp_1", {"resp_1": LinkRecord("resp_1", None, True, b"[]", damage, body)}.get)
    with pytest.raises(ServerError, match="The stored response resp_1 cannot be read"):
        build_chain("resp_1", {"resp_1": LinkRecord("resp_1", None, True, b"[]", b"[]", damage)}.get)
    with pytest.raises(ServerError, match="The stored conversation conv_1 cannot be read"):
        unpack_items("conv_1", [damage + b"{"])
    with pytest.raises(ServerError, match="The stored conversation conv_1 cannot be read"):
        unpack_conversation("conv_1", 1, damage)


@given(st.lists(json_values, min_size=1, max_size=8), st.integers(0, 3), st.integers(-2, 12))
def test_batch_is_unpacked_from_any_number(values: list[object], first: int, after: int) -> None:
    payloads = [json.dumps(value).encode() for value in values]
    (batch,) = pack_events(first, payloads)
    numbered = list(enumerate(payloads, start=first))
    assert list(unpack_events(batch.last, batch.lines, after)) == [event for event in numbered if event[0] > after]


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 3), st.integers(1, 60))
def test_batches_of_events_have_a_limited_size(sizes: list[int], first: int, limit: int) -> None:
    payloads = [b"x" * size for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "BATCH_BYTES", limit)
        batches = pack_events(first, payloads)
    assert [batch.first for batch in batches] == [
        first + sum(batch.last - batch.first + 1 for batch in batches[:index]) for index, batch in enumerate(batches)
    ]
    unpacked = [event for batch in batches for event in unpack_events(batch.last, batch.lines, -1)]
    assert unpacked == list(enumerate(payloads, start=first))
    assert all(len(batch.lines.replace(b"\n", b"")) <= limit or batch.first == batch.last for batch in batches)
