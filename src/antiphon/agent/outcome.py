"""The outcome of a run, and the events on the way to it."""

import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Generic, Literal

from msgspec import Struct, field

from antiphon.protocol.response import Usage
from antiphon.tools.base import PendingToolCall, ToolInvocation

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    OutputT_co = TypeVar("OutputT_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    OutputT_co = TypeVar("OutputT_co", covariant=True)

OutcomeKind = Literal[
    "final",
    "decision",
    "incomplete",
    "max_turns",
    "no_progress",
    "budget",
    "deadline",
    "cancelled",
    "needs_approval",
    "blocked",
    "failed",
]


class RunError(Struct, frozen=True):
    """The reason why a run failed. `raw` is the invalid text if the output did not match its type."""

    code: str
    message: str
    raw: str | None = None


class Outcome(Struct, Generic[OutputT_co], frozen=True, kw_only=True):
    """The result of an agent run."""

    kind: OutcomeKind
    run_id: str
    agent: str = ""
    """The name of the agent that ended the run."""
    output: OutputT_co = None  # type: ignore[assignment]  # the type is for runs that end with an answer
    """The typed output of a `final` run, the arguments of a `decision`, or the text of an `incomplete` run.

    It is None if the run has no answer: check `kind` first.
    """
    text: str = ""
    """The last text."""
    usage: Usage
    turns: int
    tool_calls: int
    cost: float | None = None
    currency: str | None = None
    pending: tuple[PendingToolCall, ...] = ()
    """The calls that wait for the decision of a person."""
    abandoned: tuple[ToolInvocation, ...] = ()
    """The calls whose tools did not stop at the time limit of the tool or of the run. They may still be running."""
    error: RunError | None = None
    history: tuple[dict[str, Any], ...] = ()
    """The whole conversation as items. A new run can continue it."""
    state: bytes | None = None
    """Set if the run can be resumed: another process can resume it from these bytes."""


class _Stamp(Struct, kw_only=True):
    """The fields that every new event sets itself."""

    timestamp: float = field(default_factory=time.time)
    parent_id: str | None = None


class RunEvent(_Stamp, tag_field="type"):
    """Base of the events of a run.

    `timestamp` is the time of the event in seconds since 1970. `parent_id` is the id of the run whose tool call has
    started this run, or None.
    """

    run_id: str


class TurnStarted(RunEvent, tag="turn.started"):
    number: int


class TurnRestarted(RunEvent, tag="turn.restarted"):
    """The turn failed and starts again. Discard the deltas received since it started."""

    number: int
    reason: str


class TextDelta(RunEvent, tag="text.delta", gc=False):
    text: str


class ReasoningDelta(RunEvent, tag="reasoning.delta", gc=False):
    text: str


class ArgumentsDelta(RunEvent, tag="arguments.delta", gc=False):
    """A part of the arguments of a tool call that the model is writing."""

    call_id: str
    name: str
    text: str


class PartialOutput(RunEvent, tag="output.partial"):
    """The typed output as far as the model has written it. Only streams with `partial_output` have them.

    `data` is the JSON so far. `output` is the value of the output type, or None if `data` does not match the type yet.
    The last one of a run has the whole output.
    """

    data: Any
    output: Any


class ModelEvent(RunEvent, tag="model.event"):
    """An event of the Responses API as the server has sent it. Only streams with `raw_events` have them."""

    event: Any


class ToolStarted(RunEvent, tag="tool.started"):
    """A tool call begins. If it starts a subagent, `idempotency_key` is the id of the subagent's run."""

    call: ToolInvocation
    idempotency_key: str = ""


class ToolProgress(RunEvent, tag="tool.progress"):
    call_id: str
    message: str


class ToolFinished(RunEvent, tag="tool.finished"):
    """The result of a tool call. `may_have_happened` is True if it failed but may have had its effect."""

    call: ToolInvocation
    output: Any
    is_error: bool
    may_have_happened: bool = False


class AgentChanged(RunEvent, tag="agent.changed"):
    """The run was handed over to another agent."""

    from_agent: str
    agent: str


class TurnFinished(RunEvent, tag="turn.finished"):
    number: int
    response_id: str
    usage: Usage


class Notice(RunEvent, tag="notice"):
    """A message for people: a repeated call, an estimated usage, a limit that was reached."""

    message: str


class SubagentEvent(RunEvent, tag="subagent.event"):
    """An event in the run of a subagent, which the tool call `call_id` has started.

    `event` has the `run_id` of the subagent's run, and the id of this run as its `parent_id`.
    """

    call_id: str
    event: RunEvent


class RunEnded(RunEvent, tag="run.ended"):
    """The last event. `RunStream.outcome` is the same outcome, with the type of its output."""

    outcome: Outcome[Any]


RunEvents = AsyncGenerator[RunEvent, None]
