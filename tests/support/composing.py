"""Composers with predictable ids, and shortcuts for their events and responses."""

import itertools
from collections.abc import Sequence

from antiphon.protocol import events
from antiphon.protocol.events import Event
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.composer import Composer

TEXT_START = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]


def new_composer() -> Composer:
    """Return a composer with the ids `msg_1`, `fc_2` and so on."""
    serial = itertools.count(1)
    return Composer(
        Response(id="resp_1", created_at=1, model="m"), new_id=lambda prefix: f"{prefix}_{next(serial)}", now=lambda: 9
    )


def compose(*batch: d.Delta) -> list[Event | Unknown]:
    composer = new_composer()
    return [*composer.start(), *composer.compose(batch)]


def compose_types(*batch: d.Delta) -> list[str]:
    """Return the types of the composed events, without the prefix `response.`."""
    return [event.type.removeprefix("response.") for event in compose(*batch)]


def compose_response(*batch: d.Delta) -> Response:
    """Return the response of the last event."""
    last = compose(*batch)[-1]
    assert isinstance(last, events.Lifecycle)
    return last.response


def new_replay_composer() -> Composer:
    """Return a composer whose item ids contain the token of the response id, as `decompose_events` expects."""
    serial = itertools.count(1)
    return Composer(
        Response(id="resp_token", created_at=1, model="m"),
        new_id=lambda prefix: f"{prefix}_token{next(serial)}",
        now=lambda: 9,
    )


def compose_replay(turn: Sequence[d.Delta]) -> list[Event | Unknown]:
    composer = new_replay_composer()
    return [*composer.start(), *composer.compose(turn)]
