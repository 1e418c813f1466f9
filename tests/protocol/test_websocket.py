import json
from typing import Any

import pytest
from msgspec import Raw
from openai.types.responses import ResponseSteerAcceptedEvent, ResponseSteerFailedEvent, ResponseSteerPendingEvent
from openai.types.responses.responses_server_event import ResponseWsError

from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.events import ErrorPayload
from antiphon.protocol.items import Message
from antiphon.protocol.websocket import (
    RequiredInput,
    ReturnedSteer,
    SocketError,
    Steer,
    SteerAccepted,
    SteerError,
    SteerFailed,
    SteerPending,
    SteerRequest,
)

STEER = Steer("steer_1", "resp_1")
REQUIRED = [
    RequiredInput(type="function_call_output", call_id="call_1", name="f"),
    RequiredInput(type="custom_tool_call_output", call_id="call_2"),
    RequiredInput(type="tool_search_output", call_id="call_3", execution="client"),
    RequiredInput(type="mcp_approval_response", approval_request_id="mcpr_1"),
]


@pytest.mark.parametrize(
    ("sent", "model"),
    [
        (SteerAccepted(1, STEER), ResponseSteerAcceptedEvent),
        (SteerPending(2, STEER, REQUIRED), ResponseSteerPendingEvent),
        (SteerFailed(3, SteerError("a", "b"), ReturnedSteer("resp_1", Raw(b'"hi"'))), ResponseSteerFailedEvent),
        (SocketError(400, ErrorPayload("t", "c", "m", None)), ResponseWsError),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_messages_are_valid_for_sdk(sent: Any, model: Any) -> None:
    line = codec.encode(sent)
    parsed = model.model_validate_json(line, strict=True)
    assert parsed.to_dict(exclude_unset=True) == json.loads(line)


def test_steer_message_is_decoded() -> None:
    body = b'{"type":"response.steer","previous_response_id":"resp_1","input":[{"role":"user","content":"hi"}],"a":1}'
    assert codec.decode_steer(body) == codec.Decoded(
        SteerRequest(type="response.steer", previous_response_id="resp_1", input=[Message("user", "hi")]),
        ("a",),
    )


@pytest.mark.parametrize("given", [b"", b',"input":null', b',"input":{}', b',"input":[{"role":"user","content":1}]'])
def test_steer_message_with_invalid_input_is_rejected(given: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.decode_steer(b'{"type":"response.steer","previous_response_id":"resp_1"%b}' % given)
    assert (refused.value.param or "").startswith("input")


@pytest.mark.parametrize("body", [b"[]", b"x", b"\xff", b"[" * 5000])
def test_header_of_non_object_is_rejected(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        codec.decode_header(body)


def test_header_accepts_values_of_any_type() -> None:
    header = codec.decode_header(b'{"type":7,"stream_id":{},"input":{"x" : 1},"more":null}')
    assert (header.type, header.stream_id, header.previous_response_id, bytes(header.input)) == (
        7,
        {},
        None,
        b'{"x" : 1}',
    )
