"""Which events a stream tells, and which it forwards."""

import functools
from typing import Any

import pytest

from behaviour.event_samples import make_event
from behaviour.samples import TOOLS
from behaviour.wire import stream
from manifest import names

# Together they bring about all that can happen to a response.
OCCASIONS = ("everything", "cite file_path!", "long", "fail")


@functools.cache
def tell_all(server: Any) -> set[str]:
    told = {event["type"] for asked in OCCASIONS for event in stream(server, asked)}
    told |= {event["type"] for event in stream(server, [{"type": "compaction_trigger"}])}
    told |= {event["type"] for event in stream(server, "use shell!", tools=[TOOLS["shell"]])}
    return told | {event["type"] for event in stream(server, "hi", background=True)}


@pytest.mark.parametrize("name", names("events", "implemented"))
def test_it_is_told(server: Any, name: str) -> None:
    assert name in tell_all(server)


def test_nothing_else_is_told(server: Any) -> None:
    assert tell_all(server) == set(names("events", "implemented"))


@pytest.mark.parametrize("name", names("events", "accepted"))
def test_a_backends_own_event_is_forwarded_with_its_place_in_the_numbering(server: Any, name: str) -> None:
    for background in (False, True):
        events = stream(server, f"event {name}!", background=background)
        place = [event["type"] for event in events].index("response.in_progress") + 1
        assert events[place] == make_event(name) | {"sequence_number": place}
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
