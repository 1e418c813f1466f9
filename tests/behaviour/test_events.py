"""Events that a stream sends, and events that it forwards."""

import functools
from typing import Any

import pytest

from behaviour.event_samples import make_event
from behaviour.samples import TOOLS
from behaviour.wire import stream
from manifest import names

# Together these inputs produce all events of a response.
INPUTS = ("everything", "cite file_path!", "long", "fail")


@functools.cache
def collect_types(server: Any) -> set[str]:
    types = {event["type"] for text in INPUTS for event in stream(server, text)}
    types |= {event["type"] for event in stream(server, [{"type": "compaction_trigger"}])}
    types |= {event["type"] for event in stream(server, "use shell!", tools=[TOOLS["shell"]])}
    return types | {event["type"] for event in stream(server, "hi", background=True)}


@pytest.mark.parametrize("name", names("events", "implemented"))
def test_implemented_event_is_sent(server: Any, name: str) -> None:
    assert name in collect_types(server)


def test_no_other_event_is_sent(server: Any) -> None:
    assert collect_types(server) == set(names("events", "implemented"))


@pytest.mark.parametrize("name", names("events", "accepted"))
def test_event_of_a_backend_is_forwarded_with_a_new_number(server: Any, name: str) -> None:
    for background in (False, True):
        events = stream(server, f"event {name}!", background=background)
        index = [event["type"] for event in events].index("response.in_progress") + 1
        assert events[index] == make_event(name) | {"sequence_number": index}
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
