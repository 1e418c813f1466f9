"""Steering: what a client may say to a response that is under way, and what comes of it."""

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
    """The input is not taken over. The client gets it back, with this code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class QueuedSteer(msgspec.Struct, frozen=True, kw_only=True):
    """Input that was accepted: as items, and as it came."""

    id: str
    target: str
    items: list[Item | Unknown]
    raw: Raw

    @property
    def receipt(self) -> Steer:
        return Steer(self.id, self.target)

    def give_back(self, number: int, code: str, message: str) -> SteerFailed:
        return SteerFailed(number, SteerError(code, message), ReturnedSteer(self.target, self.raw, self.id))


def read_steer(body: bytes, raw: Raw) -> QueuedSteer:
    """The input of a `response.steer` message. Raises SteerRefused."""
    try:
        steer, unknown = codec.decode_steer(body)
    except InvalidRequest as error:
        raise SteerRefused("invalid_input", error.message) from None
    if unknown:
        raise SteerRefused("invalid_input", f"A steering message does not take '{unknown[0]}'.")
    items = [Message("user", steer.input)] if isinstance(steer.input, str) else steer.input
    if not items:
        raise SteerRefused("invalid_input", "There is nothing in 'input'.")
    for index, item in enumerate(items):
        if not _is_steering(item):
            raise SteerRefused("invalid_input", f"input[{index}]: only messages of the user can steer a response.")
    return QueuedSteer(id=f"steer_{new_token()}", target=steer.previous_response_id, items=list(items), raw=raw)


def _is_steering(item: Item | Unknown) -> bool:
    if not isinstance(item, Message) or item.role != "user":
        return False
    return isinstance(item.content, str) or all(isinstance(part, _CONTENT) for part in item.content)


def check_support(request: CreateRequest) -> None:
    """Raise unless a response to this request can be steered."""
    for name in ("conversation", "context_management"):
        if getattr(request, name):
            raise SteerRefused("steering_not_supported", f"A response with '{name}' cannot be steered.")


def succeed(run: Run, steers: Sequence[QueuedSteer]) -> CreateRequest:
    """The request that goes on after a response: with its settings, and with what the client had to say to it."""
    return msgspec.structs.replace(
        run.request,
        previous_response_id=run.response.id,
        input=[item for steer in steers for item in steer.items],
        prompt=None,  # its template has been filled in
    )


def prepend(steers: Sequence[QueuedSteer], request: CreateRequest) -> CreateRequest:
    """The client's own continuation, with the input that has waited for it in front."""
    own: Sequence[Item | Unknown] = (
        [Message("user", request.input)] if isinstance(request.input, str) else request.input or ()
    )
    return msgspec.structs.replace(request, input=[*(item for steer in steers for item in steer.items), *own])


def find_required(output: Sequence[Item | Unknown]) -> list[RequiredInput]:
    """What the client owes before anything else can be said: the outputs of calls, and decisions."""
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


def explain(error: AntiphonError) -> str:
    return f"The response that was to go on could not be created: {error.message}"
