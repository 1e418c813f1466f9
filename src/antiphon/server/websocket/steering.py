"""Steering: user input for a response that is in progress, sent as `response.steer`."""

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from antiphon.engine.prepare.history_repair import find_unanswered_calls
from antiphon.engine.respond.ids import new_token
from antiphon.engine.respond.run import Run
from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.content import InputFile, InputImage, InputText
from antiphon.protocol.hosted import McpApprovalRequest, ToolSearchCall
from antiphon.protocol.items import FunctionCall, Item, Message
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.protocol.websocket import RequiredInput, ReturnedSteer, Steer, SteerError, SteerFailed

_CONTENT = (InputText, InputImage, InputFile)


class SteerRefused(Exception):
    """The steering input is refused. The client gets it back with this code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class QueuedSteer(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted steering input: `items` as decoded, `raw` as received. `target` is the response to steer."""

    id: str
    target: str
    items: list[Item | Unknown]
    raw: Raw

    @property
    def acknowledgement(self) -> Steer:
        return Steer(self.id, self.target)

    def make_failure(self, number: int, code: str, message: str) -> SteerFailed:
        """Return the event that gives the input back to the client."""
        return SteerFailed(number, SteerError(code, message), ReturnedSteer(self.target, self.raw, self.id))


def parse_steer(body: bytes, raw: Raw) -> QueuedSteer:
    """Parse a `response.steer` message. Raises SteerRefused."""
    try:
        decoded = codec.decode_steer(body)
    except InvalidRequest as error:
        raise SteerRefused("invalid_input", error.message) from None
    steer = decoded.body
    if decoded.ignored:
        raise SteerRefused("invalid_input", f"'{decoded.ignored[0]}' is not a field of a steering message.")
    items = [Message("user", steer.input)] if isinstance(steer.input, str) else steer.input
    if not items:
        raise SteerRefused("invalid_input", "'input' must not be empty.")
    for index, item in enumerate(items):
        if not _is_user_message(item):
            raise SteerRefused("invalid_input", f"input[{index}]: only user messages can steer a response.")
    return QueuedSteer(id=f"steer_{new_token()}", target=steer.previous_response_id, items=list(items), raw=raw)


def _is_user_message(item: Item | Unknown) -> bool:
    if not isinstance(item, Message) or item.role != "user":
        return False
    return isinstance(item.content, str) or all(isinstance(part, _CONTENT) for part in item.content)


def check_steerable(request: CreateRequest) -> None:
    """Raise SteerRefused if the response to this request cannot be steered."""
    for name in ("conversation", "context_management"):
        if getattr(request, name):
            raise SteerRefused("steering_not_supported", f"A response with '{name}' cannot be steered.")


def make_successor(run: Run, steers: Sequence[QueuedSteer]) -> CreateRequest:
    """Return the request that continues a response with its own settings and the steering input."""
    return msgspec.structs.replace(
        run.request,
        previous_response_id=run.response.id,
        input=[item for steer in steers for item in steer.items],
        prompt=None,  # the template is filled in already
    )


def prepend_steers(steers: Sequence[QueuedSteer], request: CreateRequest) -> CreateRequest:
    """Return the client's continuation with the pending steering input before its own."""
    own: Sequence[Item | Unknown] = (
        [Message("user", request.input)] if isinstance(request.input, str) else request.input or ()
    )
    return msgspec.structs.replace(request, input=[*(item for steer in steers for item in steer.items), *own])


def find_required_input(output: Sequence[Item | Unknown]) -> list[RequiredInput]:
    """Return the input that the client must send before the next turn: outputs of tool calls, and approvals."""
    lone = find_unanswered_calls(output)
    required: list[RequiredInput] = []
    for index, item in enumerate(output):
        if isinstance(item, McpApprovalRequest):
            required.append(RequiredInput(type="mcp_approval_response", approval_request_id=item.id))
        elif isinstance(item, ToolSearchCall) and item.execution == "client":
            required.append(RequiredInput(type="tool_search_output", call_id=item.call_id, execution="client"))
        elif index in lone and getattr(item, "status", None) != "incomplete":
            name = item.name if isinstance(item, FunctionCall) else None
            required.append(RequiredInput(type=f"{item.type}_output", call_id=lone[index], name=name))
    return required


def explain_failed_successor(error: AntiphonError) -> str:
    return f"The continuation with this input could not be created: {error.message}"
