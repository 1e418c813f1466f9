"""Replay recorded streams of upstreams: bytes to deltas to events."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from antiphon.errors import AntiphonError
from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Failure
from antiphon.stream.sse import SseDecoder, SseMessage
from antiphon.upstream.delta_stream import Reader


def replay(make_reader: Callable[[], Reader], chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the events that a client would get. Ids are numbered and the time is fixed, so they can be compared."""
    numbers = itertools.count()
    response = Response(id="resp_0", created_at=0, model="test")
    composer = Composer(response, new_id=lambda prefix: f"{prefix}_{next(numbers)}", now=lambda: 0)
    reader, decoder = make_reader(), SseDecoder()
    events: list[Any] = [*composer.start()]
    try:
        for chunk in chunks:
            for message in decoder.feed(chunk):
                if not reader.finished:
                    events += composer.compose(reader.read(message))
        for message in decoder.close():
            if not reader.finished:
                events += composer.compose(reader.read(message))
        if not reader.finished:
            events += composer.compose(reader.end())
    except AntiphonError as error:
        events += composer.compose([Failure(error.message, error.code or "server_error", error.type, error.param)])
    except msgspec.MsgspecError:  # callers of a reader handle this error
        events += composer.compose([Failure("unreadable", "upstream_error", "server_error")])
    return [msgspec.json.decode(codec.encode(event)) for event in events]


def cut(raw: bytes, *positions: int) -> list[bytes]:
    """Split the bytes at these positions."""
    edges = [0, *sorted(positions), len(raw)]
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


def split(chunks: Iterable[bytes]) -> list[SseMessage]:
    """Return the messages of a stream. Equal messages give equal deltas, since a reader gets only these."""
    decoder = SseDecoder()
    return [message for chunk in chunks for message in decoder.feed(chunk)] + decoder.close()


def find_harmful_cuts(raw: bytes) -> list[int]:
    """Return the positions at which a split changes the messages. There should be none."""
    whole = split([raw])
    return [position for position in range(1, len(raw)) if split(cut(raw, position)) != whole]
