"""Recorded streams of other servers, read through the bridge: from their bytes to our events."""

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
    """The events that a client would see. Ids are numbered, and time stands still, so that they can be compared."""
    numbers = itertools.count()
    response = Response(id="resp_0", created_at=0, model="test")
    composer = Composer(response, new_id=lambda prefix: f"{prefix}_{next(numbers)}", now=lambda: 0)
    reader, decoder = make_reader(), SseDecoder()
    told: list[Any] = [*composer.start()]
    try:
        for chunk in chunks:
            for message in decoder.feed(chunk):
                if not reader.finished:
                    told += composer.compose(reader.read(message))
        for message in decoder.close():
            if not reader.finished:
                told += composer.compose(reader.read(message))
        if not reader.finished:
            told += composer.compose(reader.end())
    except AntiphonError as error:
        told += composer.compose([Failure(error.message, error.code or "server_error", error.type, error.param)])
    except msgspec.MsgspecError:  # whoever uses a reader knows that it may raise this
        told += composer.compose([Failure("unreadable", "upstream_error", "server_error")])
    return [msgspec.json.decode(codec.encode(event)) for event in told]


def cut(raw: bytes, *places: int) -> list[bytes]:
    """The bytes in pieces, cut at these places."""
    edges = [0, *sorted(places), len(raw)]
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


def split(chunks: Iterable[bytes]) -> list[SseMessage]:
    """The messages of a stream. A reader sees these, whole ones: where they are the same, so is all that it tells."""
    decoder = SseDecoder()
    return [message for chunk in chunks for message in decoder.feed(chunk)] + decoder.close()


def find_harmful_cuts(raw: bytes) -> list[int]:
    """The places where a cut would change the messages: there should be none."""
    whole = split([raw])
    return [place for place in range(1, len(raw)) if split(cut(raw, place)) != whole]
