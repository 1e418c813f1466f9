"""Streams that `fold` rejects. The composer tests cover legal streams."""

import pytest

from antiphon.protocol import content, events, items
from antiphon.protocol.events import Event
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.stream.fold import Fold, IllegalEvent, fold

RESPONSE = Response(id="resp_1", created_at=1, model="m")
MESSAGE = items.Message("assistant", [], "msg_1", "in_progress")
CREATED = events.Created(0, RESPONSE)
ADDED = events.OutputItemAdded(1, 0, MESSAGE)
PART = events.ContentPartAdded(2, "msg_1", 0, 0, content.OutputText(""))
DELTA = events.OutputTextDelta(3, "msg_1", 0, 0, "hi")

ILLEGAL = {
    "anything before response.created": ([ADDED], "before response.created"),
    "a second response.created": ([CREATED, events.Created(1, RESPONSE)], "twice"),
    "a sequence number that does not increase": (
        [CREATED, events.InProgress(0, RESPONSE)],
        "sequence_number 0 after 0",
    ),
    "another response id": ([CREATED, events.Completed(1, Response(id="resp_2", created_at=1, model="m"))], "resp_2"),
    "in_progress after the first item": ([CREATED, ADDED, events.InProgress(2, RESPONSE)], "after the first item"),
    "an output_index used twice": ([CREATED, ADDED, events.OutputItemAdded(2, 0, MESSAGE)], "already in use"),
    "an item done that was never added": ([CREATED, events.OutputItemDone(1, 0, MESSAGE)], "no item is open"),
    "an item done under another id": (
        [CREATED, ADDED, events.OutputItemDone(2, 0, items.Message("assistant", [], "msg_2"))],
        "is msg_1, not msg_2",
    ),
    "an item done with an open part": ([CREATED, ADDED, PART, events.OutputItemDone(3, 0, MESSAGE)], "part of it"),
    "a part of an item that was never added": ([CREATED, PART], "no item is open"),
    "a part added twice": (
        [CREATED, ADDED, PART, events.ContentPartAdded(3, "msg_1", 0, 0, content.OutputText(""))],
        "already added",
    ),
    "text without its part": ([CREATED, ADDED, DELTA], "is not open"),
    "a done event with other text than its deltas": (
        [CREATED, ADDED, PART, DELTA, events.OutputTextDone(4, "msg_1", 0, 0, "ho")],
        "does not match its deltas",
    ),
    "a part with other text than its deltas": (
        [CREATED, ADDED, PART, DELTA, events.ContentPartDone(4, "msg_1", 0, 0, content.OutputText("ho"))],
        "does not match its deltas",
    ),
    "an end while an item is open": ([CREATED, ADDED, events.Completed(2, RESPONSE)], "not done"),
    "anything after the end": ([CREATED, events.Completed(1, RESPONSE), ADDED], "after the terminal event"),
    "anything but failed after an error": (
        [CREATED, events.Error(1, events.ErrorPayload("server_error", None, "x", None)), events.Completed(2, RESPONSE)],
        "after an error",
    ),
    "no end": ([CREATED], "without a terminal event"),
    "nothing": ([], "without a terminal event"),
}


@pytest.mark.parametrize(("stream", "reason"), ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_stream_raises(stream: list[Event], reason: str) -> None:
    with pytest.raises(IllegalEvent, match=reason):
        fold(stream)


def test_illegal_event_leaves_state_unchanged() -> None:
    state = Fold()
    for event in (CREATED, ADDED, PART):
        state.feed(event)
    with pytest.raises(IllegalEvent):
        state.feed(events.OutputItemDone(3, 0, MESSAGE))
    for event in (
        DELTA,
        events.OutputTextDone(4, "msg_1", 0, 0, "hi"),
        events.ContentPartDone(5, "msg_1", 0, 0, content.OutputText("hi")),
        events.OutputItemDone(6, 0, items.Message("assistant", [content.OutputText("hi")], "msg_1", "completed")),
        events.Completed(7, RESPONSE),
    ):
        state.feed(event)
    assert state.finished


def test_unknown_events_are_allowed_before_terminal_event() -> None:
    tick = Unknown(b'{"type":"keepalive"}')
    assert fold([tick, CREATED, tick, events.Completed(1, RESPONSE)]) == RESPONSE


def test_output_is_built_from_item_events() -> None:
    done = items.FunctionCall("c", "f", "{}", "fc_1", "completed")
    stream = [
        CREATED,
        events.OutputItemAdded(1, 0, items.FunctionCall("c", "f", "", "fc_1", "in_progress")),
        events.FunctionCallArgumentsDone(2, "fc_1", 0, "{}"),
        events.OutputItemDone(3, 0, done),
        events.Completed(4, RESPONSE),
    ]
    assert fold(stream).output == [done]
