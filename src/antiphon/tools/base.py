"""Tools as agents call them. Python functions (`function.py`) and MCP servers (`mcp.py`) both become a `Tool`."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, get_args

from msgspec import Struct, field

from antiphon.errors import ConfigError, InvalidRequest
from antiphon.protocol.response import Usage

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    DepsT_co = TypeVar("DepsT_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    DepsT_co = TypeVar("DepsT_co", covariant=True)

OnInterrupt = Literal["ask", "retry", "tell"]
"""The treatment of a call that was running when its process died, so that its effect is unknown.

`ask`: pause until a person decides. `retry`: call again with the same idempotency key. `tell`: report it to the model.
"""

_MAX_NAME_LENGTH = 64
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{_MAX_NAME_LENGTH}}}")
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")


class RunContext(Struct, Generic[DepsT_co], frozen=True, kw_only=True):
    """The context of a run, for dynamic instructions, dynamic tool lists, hooks and tools."""

    run_id: str
    deps: DepsT_co = None  # type: ignore[assignment]  # a run without deps has the type None for them
    """The object that was passed to the run."""
    agent: str = ""
    """The name of the agent."""
    turn: int = 0
    """The number of the current turn, from 1."""
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    """The usage of the run so far."""
    history: Sequence[dict[str, Any]] = ()
    """The items of the run so far. Do not change them."""


class ToolContext(RunContext[DepsT_co], Generic[DepsT_co], frozen=True, kw_only=True):
    """The context of a tool call."""

    call_id: str
    idempotency_key: str
    """The same key for every attempt at this call.

    A tool with side effects passes it on to the service that it calls.
    """
    report: Callable[[str], None] = lambda _: None
    """Shows a progress message to observers of the run. It can be called from any thread."""
    emit: Callable[[Any], None] = lambda _: None
    """Adds an event to the stream of the run. It is for subagents."""


class UsageCost(Struct, frozen=True):
    """Token usage of model calls and its cost. `cost` is None if the prices are unknown."""

    usage: Usage
    cost: float | None = None

    def __add__(self, other: "UsageCost") -> "UsageCost":
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        return UsageCost(self.usage + other.usage, cost)

    def __sub__(self, other: "UsageCost") -> "UsageCost":
        cost = self.cost if self.cost is None or other.cost is None else self.cost - other.cost
        return UsageCost(self.usage - other.usage, cost)


class ContentPart(Struct, frozen=True, kw_only=True):
    """Base of images and files, which a model gets as content parts."""

    def to_part(self) -> dict[str, Any]:
        """Return the content part of the Responses API."""
        raise NotImplementedError


class ToolResult(Struct, frozen=True):
    """The output of a tool call."""

    output: str | list[dict[str, Any]]
    """The text, or content parts of the Responses API, that the model reads."""
    is_error: bool = False
    spent: UsageCost | None = None
    """The usage of models that the tool itself has called. It counts against the limits of the run."""
    tool_calls: int = 0
    """The number of their tool calls. They count against the limits of the run."""
    may_have_happened: bool = False
    """Set with an error if the call may still have had its effect, for example after a timeout.

    If the model repeats the call, it has the same idempotency key.
    """


class Tool(Struct, frozen=True, kw_only=True):
    """A tool that can be offered to a model and called."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON Schema of the arguments, in strict form if `strict` is set."""
    invoke: Callable[[str, ToolContext[Any]], Awaitable[ToolResult]]
    """Gets the arguments as the text that the model wrote. It may raise, and may be cancelled."""
    strict: bool = True
    timeout: float | None = None
    """Time limit of each attempt, in seconds."""
    retries: int = 0
    """Number of further attempts after an exception or a timeout."""
    concurrency: int | None = None
    """Maximum number of parallel calls."""
    needs_approval: bool | Callable[[Mapping[str, Any]], bool] = False
    """Require approval of all calls, or depending on the arguments."""
    on_interrupt: OnInterrupt = "ask"
    """Handling of a call that was interrupted: ask a person, retry the call, or tell the model."""
    repeatable: bool = False
    """Permit repeated calls with the same arguments, for example for the current time.

    Without it they count as a loop.
    """
    final: bool = False
    """The result is the final answer of the run, unless it is an error."""

    def __post_init__(self) -> None:
        require_name(self.name)
        # Not every program uses a type checker.
        timeout, retries, concurrency = (getattr(self, each) for each in ("timeout", "retries", "concurrency"))
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):  # also for NaN
            raise ConfigError(f"The timeout of the tool '{self.name}' must be a number of seconds, more than 0.")
        if not isinstance(retries, int) or retries < 0:
            raise ConfigError(f"The retries of the tool '{self.name}' must be an integer, at least 0.")
        if concurrency is not None and not (isinstance(concurrency, int) and concurrency >= 1):
            raise ConfigError(f"The concurrency of the tool '{self.name}' must be an integer, at least 1.")
        if not isinstance(self.needs_approval, bool) and not callable(self.needs_approval):
            raise ConfigError(f"The needs_approval of the tool '{self.name}' must be True, False or a function.")
        if inspect.iscoroutinefunction(self.needs_approval):
            # The coroutine that it returns would be true for every call.
            raise ConfigError(f"The needs_approval of the tool '{self.name}' must not be a coroutine function.")
        if self.on_interrupt not in get_args(OnInterrupt):
            raise ConfigError(f"The on_interrupt of the tool '{self.name}' must be one of: ask, retry, tell.")

    def describe(self) -> dict[str, Any]:
        """Return the tool definition for a request."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
            "strict": self.strict,
        }


class ToolInvocation(Struct, frozen=True):
    """A tool call that a model has requested. `arguments` is the text that the model wrote."""

    call_id: str
    name: str
    arguments: str


class ModelRetry(Exception):
    """Raised by a tool or a guardrail to send a call, its result or an answer back to the model with a message."""


PendingReason = Literal["needs_approval", "may_have_happened"]
"""The reason why a call waits for a person.

`needs_approval`: the call was not made yet. `may_have_happened`: the call was running when its process was interrupted.
"""


class PendingToolCall(ToolInvocation, frozen=True):
    """A tool call that waits for the decision of a person.

    `idempotency_key` is the key that the tool gets if the call is approved, and that it had in an interrupted attempt.
    """

    reason: PendingReason = "needs_approval"
    idempotency_key: str = ""


class ApprovalRequired(Exception):
    """Raised by a tool whose own tool calls (`calls`) need approval before it can continue.

    After the decision the tool is called again, with `state` if it set one.
    """

    def __init__(self, calls: tuple[PendingToolCall, ...], state: bytes | None) -> None:
        super().__init__("waiting for approval")
        self.calls = calls
        self.state = state


class MissingTool(InvalidRequest):
    """A run, or that of a subagent, was resumed without the tool of an approved or paused call. It can be resumed."""

    default_code = "missing_tool"


def make_name(text: str) -> str:
    """Return a text as the name of a tool: other characters become "_", and a long text is cut off."""
    return _INVALID_CHARACTER.sub("_", text)[:_MAX_NAME_LENGTH]


def require_name(name: str) -> None:
    """Raise ConfigError if a tool cannot have this name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"Invalid tool name {name!r}: use 1 to 64 letters, digits, '_' and '-'.")
