"""WebSocket messages that a stream of server-sent events does not have: errors and steering."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from antiphon.protocol.events import ErrorPayload, Event
from antiphon.protocol.items import ITEMS
from antiphon.protocol.response import Reply
from antiphon.protocol.unions import Unknown, Wire, always, union_field

if TYPE_CHECKING:
    from antiphon.protocol.items import Item

    SteerInput: TypeAlias = str | list[Item | Unknown]
else:
    SteerInput = union_field(lambda: ITEMS, many=True, text=True)

CREATE = "response.create"
STEER = "response.steer"


class MessageHeader(Struct):
    """The fields that identify a message, valid or not. They determine where an error is sent."""

    type: Any = None
    stream_id: Any = None
    previous_response_id: Any = None
    input: Raw = Raw(b"")


class SteerRequest(Wire, kw_only=True):
    """A `response.steer` message: more input for a response in progress."""

    type: Literal["response.steer"]
    previous_response_id: str
    input: SteerInput

    def __post_init__(self) -> None:
        given = ITEMS.decode_text_or_list_field(self.input, "input")
        if given is None:
            raise msgspec.ValidationError("Expected `str | array`, got `null` - at `$.input`")
        self.input = given


class SocketError(Struct, tag_field="type", tag="error"):
    """An error message. `status` is the HTTP status of the same error over HTTP."""

    status: int
    error: ErrorPayload


class Steer(Reply):
    """Accepted steering input. `previous_response_id` is the id of the steered response."""

    id: str
    previous_response_id: str


class SteerAccepted(Event, tag="response.steer.accepted"):
    steer: Steer


class RequiredInput(Reply, kw_only=True):
    """An item that the client still has to send, without its content."""

    type: str
    call_id: str | None = None
    name: str | None = None
    execution: str | None = None
    approval_request_id: str | None = None


class SteerPending(Event, tag="response.steer.pending"):
    """The input waits for tool outputs and is sent to the model together with them."""

    steer: Steer
    required_input: list[RequiredInput]
    reason: Literal["waiting_for_required_input"] = always("waiting_for_required_input")


class ReturnedSteer(Reply):
    """Steering input that was not used, returned to the client unchanged."""

    previous_response_id: str
    input: Raw
    id: str | None = None


class SteerError(Reply):
    code: str
    message: str
    type: Literal["invalid_request_error"] = always("invalid_request_error")


class SteerFailed(Event, tag="response.steer.failed"):
    error: SteerError
    steer: ReturnedSteer
