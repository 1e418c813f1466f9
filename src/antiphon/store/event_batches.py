"""Encoding of stored events, shared by all stores: batches of consecutive events, one per line."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from antiphon.errors import ServerError

# Maximum size of a batch of events, unless one event is larger.
BATCH_BYTES = 256 * 1024


class EventBatch(NamedTuple):
    """The JSON of consecutive events, one per line."""

    first: int
    last: int
    lines: bytes


def pack_events(first: int, payloads: Sequence[bytes]) -> list[EventBatch]:
    """Encode consecutive events, numbered from `first`. Return no batch for no events.

    A batch is larger than `BATCH_BYTES` only if its single event is, so that a reader never has to read more at once.
    """
    batches: list[EventBatch] = []
    start = size = 0
    for index, payload in enumerate(payloads):
        size += len(payload)
        if size > BATCH_BYTES and index > start:
            batches.append(_pack_batch(first + start, payloads[start:index]))
            start, size = index, len(payload)
    if payloads:
        batches.append(_pack_batch(first + start, payloads[start:]))
    return batches


def _pack_batch(first: int, payloads: Sequence[bytes]) -> EventBatch:
    lines = b"\n".join(payloads)
    if lines.count(b"\n") >= len(payloads):
        raise ServerError("A stored event must be one line of JSON.")
    return EventBatch(first, first + len(payloads) - 1, lines)


def unpack_events(last: int, lines: bytes, after: int) -> Iterator[tuple[int, bytes]]:
    """Yield the events of a batch with a number greater than `after`, with their numbers."""
    payloads = lines.split(b"\n")
    first = last - len(payloads) + 1
    skipped = max(after + 1 - first, 0)
    return zip(range(first + skipped, last + 1), payloads[skipped:], strict=True)


def take_events(batches: Iterable[tuple[int, bytes]], after: int, max_bytes: int | None) -> list[tuple[int, bytes]]:
    """Return the events of batches with a number greater than `after`. `batches` have their last number and lines.

    The result has at most `max_bytes`, or one event that is larger. No batch is read that is not needed.
    """
    events: list[tuple[int, bytes]] = []
    left = math.inf if max_bytes is None else max_bytes
    for last, lines in batches:
        for event in unpack_events(last, lines, after):
            left -= len(event[1])
            if left < 0 and events:
                return events
            events.append(event)
        if left <= 0:
            break
    return events
