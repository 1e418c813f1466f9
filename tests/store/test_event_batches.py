"""Encoding of stored events."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.store import event_batches
from antiphon.store.event_batches import pack_events, unpack_events
from support.strategies import json_values


@given(st.lists(json_values(), min_size=1, max_size=8), st.integers(0, 3), st.integers(-2, 12))
def test_batch_is_unpacked_from_any_number(values: list[object], first: int, after: int) -> None:
    payloads = [json.dumps(value).encode() for value in values]
    (batch,) = pack_events(first, payloads)
    numbered = list(enumerate(payloads, start=first))
    assert list(unpack_events(batch.last, batch.lines, after)) == [event for event in numbered if event[0] > after]


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 3), st.integers(1, 60))
def test_batches_of_events_have_a_limited_size(sizes: list[int], first: int, limit: int) -> None:
    payloads = [b"x" * size for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_batches, "BATCH_BYTES", limit)
        batches = pack_events(first, payloads)
    assert [batch.first for batch in batches] == [
        first + sum(batch.last - batch.first + 1 for batch in batches[:index]) for index, batch in enumerate(batches)
    ]
    unpacked = [event for batch in batches for event in unpack_events(batch.last, batch.lines, -1)]
    assert unpacked == list(enumerate(payloads, start=first))
    assert all(len(batch.lines.replace(b"\n", b"")) <= limit or batch.first == batch.last for batch in batches)
