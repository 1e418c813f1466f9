import json
from typing import Any

import pytest
from msgspec import inspect
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from antiphon.protocol.codec import EVENTS, decode_event, encode
from antiphon.protocol.content import OutputText, SummaryText, UrlCitation
from antiphon.protocol.events import (
    CORE_EVENTS,
    ContentPartAdded,
    Error,
    ErrorPayload,
    OutputItemAdded,
    OutputTextAnnotationAdded,
    OutputTextDelta,
    ReasoningDelta,
    ReasoningDone,
)
from antiphon.protocol.hosted_events import HOSTED_EVENTS
from antiphon.protocol.items import FunctionCall, Message, Reasoning
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from support import openresponses

ALL = {event.__struct_config__.tag: event for event in (*CORE_EVENTS, *HOSTED_EVENTS)}
RESPONSE = Response(id="resp_1", created_at=1, model="m")
MESSAGE = Message("assistant", [], id="msg_1", status="in_progress")
VALUES: dict[str, Any] = {
    "response": RESPONSE,
    "item": MESSAGE,
    "annotation": UrlCitation("u", "t", 0, 1),
    "error": ErrorPayload("server_error", None, "broke", None),
}
# The SDK lacks the event names of Open Responses. Its error type is flat, though it raises only for a nested error.
NOT_IN_SDK = {Error, ReasoningDelta, ReasoningDone}
sdk_events: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def make_minimal(event: type) -> Any:
    """Return an event with only its required fields."""
    info = inspect.type_info(event)
    assert isinstance(info, inspect.StructType)
    return event(**{field.name: value_for(field) for field in info.fields if field.required})


def value_for(field: inspect.Field) -> Any:
    if field.name == "part":
        return SummaryText("s") if isinstance(field.type, inspect.StructType) else OutputText("hi")
    if field.name in VALUES:
        return VALUES[field.name]
    blanks = {inspect.IntType: 0, inspect.StrType: "", inspect.DictType: {}, inspect.ListType: []}
    return blanks[type(field.type)]


def encoded(value: Any) -> Any:
    return json.loads(encode(value))


@pytest.mark.parametrize("tag", [tag for tag, event in ALL.items() if event not in NOT_IN_SDK])
def test_minimal_event_is_valid_for_sdk(tag: str) -> None:
    event = make_minimal(ALL[tag])
    assert sdk_events.validate_json(encode(event), strict=True).type == event.type == tag


@pytest.mark.parametrize("tag", ALL)
def test_minimal_event_is_valid_open_responses(tag: str) -> None:
    if tag in openresponses.event_schemas():
        openresponses.validate_event(encoded(make_minimal(ALL[tag])))


def test_every_open_responses_event_is_a_core_event() -> None:
    assert set(openresponses.event_schemas()) <= {event.__struct_config__.tag for event in CORE_EVENTS}


@pytest.mark.parametrize(
    "item",
    [
        MESSAGE,
        Message("assistant", [OutputText("hi")], id="msg_1", status="completed", phase="final_answer"),
        FunctionCall("c", "f", "", "fc_1", "in_progress"),
        Reasoning(id="rs_1"),
    ],
)
def test_item_in_event_is_valid_for_sdk_and_open_responses(item: Any) -> None:
    event = OutputItemAdded(0, 0, item)
    sdk_events.validate_json(encode(event), strict=True)
    openresponses.validate_event(encoded(event))


def test_event_tags_are_unique() -> None:
    assert len(EVENTS.members) == len(CORE_EVENTS) + len(HOSTED_EVENTS)


def test_error_event_is_nested_with_all_four_keys() -> None:
    event = Error(3, ErrorPayload("server_error", None, "broke", None))
    assert encoded(event) == {
        "type": "error",
        "sequence_number": 3,
        "error": {"type": "server_error", "code": None, "message": "broke", "param": None},
    }


def test_text_delta_has_logprobs_and_no_padding_by_default() -> None:
    assert encoded(OutputTextDelta(1, "msg_1", 0, 0, "hi")) == {
        "type": "response.output_text.delta",
        "sequence_number": 1,
        "item_id": "msg_1",
        "output_index": 0,
        "content_index": 0,
        "delta": "hi",
        "logprobs": [],
    }


def test_open_responses_reasoning_events_have_same_fields() -> None:
    assert encoded(ReasoningDelta(1, "rs_1", 0, 0, "hm")) == {
        "type": "response.reasoning.delta",
        "sequence_number": 1,
        "item_id": "rs_1",
        "output_index": 0,
        "content_index": 0,
        "delta": "hm",
    }


def test_annotation_may_be_null() -> None:
    event = OutputTextAnnotationAdded(1, "msg_1", 0, 0, 0)
    assert decode_event(encode(event)) == event
    openresponses.validate_event(encoded(event))


@pytest.mark.parametrize("event", [make_minimal(OutputItemAdded), make_minimal(ContentPartAdded)])
def test_event_with_null_item_or_part_is_unknown(event: Any) -> None:
    raw = json.dumps({**encoded(event), "item": None, "part": None}).encode()
    assert decode_event(raw) == Unknown(raw)
