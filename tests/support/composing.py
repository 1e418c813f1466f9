"""Composers with ids that can be foretold, and what they tell: what tests of streams share."""

import itertools

from antiphon.protocol import events
from antiphon.protocol.events import Event
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.composer import Composer


def new_composer() -> Composer:
    serial = itertools.count(1)
    return Composer(
        Response(id="resp_1", created_at=1, model="m"), new_id=lambda prefix: f"{prefix}_{next(serial)}", now=lambda: 9
    )


def compose(*batch: d.Delta) -> list[Event | Unknown]:
    composer = new_composer()
    return [*composer.start(), *composer.compose(batch)]


def told(*batch: d.Delta) -> list[str]:
    return [event.type.removeprefix("response.") for event in compose(*batch)]


def final(*batch: d.Delta) -> Response:
    last = compose(*batch)[-1]
    assert isinstance(last, events.Lifecycle)
    return last.response


TEXT = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]
