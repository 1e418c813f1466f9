"""The messages of a WebSocket that a stream of server-sent events does not have: errors, and steering."""

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
    """What can be said of any message, valid or not: it tells how to answer it."""

    type: Any = None
    stream_id: Any = None
    previous_response_id: Any = None
    input: Raw = Raw(b"")


class SteerRequest(Wire, kw_only=True):
    """More input for a response that is under way."""

    type: Literal["response.steer"]
    previous_response_id: str
    input: SteerInput

    def __post_init__(self) -> None:
        given = ITEMS.decode_text_or_list_field(self.input, "input")
        if given is None:
            raise msgspec.ValidationError("Expected `str | array`, got `null` - at `$.input`")
        self.input = given


class SocketError(Struct, tag_field="type", tag="error"):
    """A message that could not be served. `status` is what it would have been over HTTP."""

    status: int
    error: ErrorPayload


class Steer(Reply):
    """Steering input that the server has taken over. `previous_response_id` is the response to be steered."""

    id: str
    previous_response_id: str


class SteerAccepted(Event, tag="response.steer.accepted"):
    steer: Steer


class RequiredInput(Reply, kw_only=True):
    """An item that the client owes, without its content."""

    type: str
    call_id: str | None = None
    name: str | None = None
    execution: str | None = None
    approval_request_id: str | None = None


class SteerPending(Event, tag="response.steer.pending"):
    """The input waits for outputs of calls, and goes with them."""

    steer: Steer
    required_input: list[RequiredInput]
    reason: Literal["waiting_for_required_input"] = always("waiting_for_required_input")


class ReturnedSteer(Reply):
    """Steering input as the client has sent it, given back."""

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
