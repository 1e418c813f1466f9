"""The entries of a run's journal.

Ledgers and packed states store them as JSON. The tags and the encoded field names are those of version 0.1.0 and must
not change; `tag` and `name` state them where the Python name is another one. Fields that were added later are UNSET in
older entries.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field, structs

from antiphon.agent.limits import Limits
from antiphon.agent.outcome import RunError
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage
from antiphon.tools.base import PendingReason, ToolInvocation, UsageCost

Consequence = Literal["", "decision", "final", "output", "invalid_output", "no_progress", "budget", "blocked"]
"""The effect of a call's result on the run.

`decision`, `final` and `output`: the arguments of a decision, the result of a final tool, or the arguments of an output
tool are the answer. `invalid_output`: the arguments of an output tool do not match the output type.
`no_progress` and `budget`: it ends the use of tools. `blocked`: it ends the run.
"""


class UnresolvedCall(ToolInvocation, frozen=True):
    """A call whose effect is not known: it timed out, or it was running when its process or its subagent ended.

    `state` is that of the run of a subagent, if the call has started one and there is no ledger that has it. `spent`
    and `tool_calls` are the usage and the calls of this run that were counted with the call.
    """

    idempotency_key: str = ""
    state: bytes | UnsetType = UNSET
    spent: UsageCost | UnsetType = UNSET
    tool_calls: int | UnsetType = UNSET

    def add_counted(self, spent: UsageCost | UnsetType | None, tool_calls: int | UnsetType) -> "UnresolvedCall":
        """Return the call after more of the usage and of the calls of its subagent was counted."""
        if not spent and not tool_calls:
            return self
        joined = self.spent + spent if self.spent and spent else self.spent or spent or UNSET
        return structs.replace(self, spent=joined, tool_calls=(self.tool_calls or 0) + (tool_calls or 0))


class _Entry(Struct, tag_field="entry", frozen=True):
    """Base of all entries."""


class Overrides(Struct, frozen=True, omit_defaults=True):
    """The options of a run that replace or extend those of its agent. A resumed run uses them again."""

    model: str | None = None
    settings: JsonObject | None = None
    limits: Limits | None = None

    @property
    def is_empty(self) -> bool:
        return self == NO_OVERRIDES

    def merge(self, later: "Overrides") -> "Overrides":
        """Return these options with those of a later resumption."""
        settings = self.settings if later.settings is None else (self.settings or {}) | later.settings
        return Overrides(later.model or self.model, settings, later.limits or self.limits)


NO_OVERRIDES = Overrides()


class StartEntry(_Entry, tag="Began", frozen=True):
    """The start of a run. `agent` is the name of the agent, `model` that of its model, `at` a time in seconds.

    `unresolved` are the unresolved calls of earlier runs of the same subagent.
    A run in a session has the id of the session. `earlier_count` is the number of items of the input from the session.
    """

    agent: str
    input: list[JsonObject]
    at: float
    overrides: Overrides | UnsetType = UNSET
    model: str | UnsetType = UNSET
    unresolved: list[UnresolvedCall] | UnsetType = UNSET
    session_id: str | UnsetType = UNSET
    earlier_count: int | UnsetType = UNSET


class InputReplacedEntry(_Entry, tag="InputReplaced", frozen=True):
    """A guardrail has replaced the input of the run, before the first turn."""

    input: list[JsonObject]


class AnswerEntry(_Entry, tag="Answered", frozen=True):
    """A finished turn of the model.

    `extra_input` are the items that were sent for this turn in addition to the history: a reminder, or the reason why
    the answer before was invalid. `last_turn_reason` is set if this was the last turn of the run, without tools.
    `repairs_output` is true if the turn repeats an answer that did not match the output type. `incomplete_reason` is
    set if the answer was cut off. `drops_encrypted` is true if the server could not decrypt the earlier reasoning; the
    run goes on without it. `native_calls` are the ids of calls, other than those of functions, that the agent runs.
    """

    response_id: str
    output: list[JsonObject]
    usage: Usage
    extra_input: list[JsonObject] = field(default_factory=list, name="told")
    last_turn_reason: str = field(default="", name="last")
    repairs_output: bool = field(default=False, name="repairs")
    incomplete_reason: str = field(default="", name="cut")
    drops_encrypted: bool = field(default=False, name="unsealed")
    native_calls: list[str] | UnsetType = UNSET


class FailedAttemptEntry(_Entry, tag="Wasted", frozen=True):
    """The usage of an attempt at a turn that failed."""

    usage: Usage


class OutputReplacedEntry(_Entry, tag="OutputReplaced", frozen=True):
    """A guardrail has replaced the text of the last answer."""

    text: str


class ArgumentsReplacedEntry(_Entry, tag="ArgumentsReplaced", frozen=True):
    """A guardrail has replaced the arguments of a call, before a person was asked about it and before it ran."""

    call_id: str
    arguments: str


class CallIntentEntry(_Entry, tag="Intended", frozen=True):
    """A call is about to run. It uses up the verdict on the call."""

    call_id: str


class PausedCall(ToolInvocation, frozen=True):
    """A tool call of a subagent that waits for a person."""

    reason: PendingReason | UnsetType = UNSET
    idempotency_key: str | UnsetType = UNSET


class CallPauseEntry(_Entry, tag="Paused", frozen=True):
    """A call of a subagent was left before its end: it waits for approval of `calls`, or the run was stopped.

    `calls` are tool calls of the subagent. The call runs again when the run is resumed, and resumes the subagent from
    `state`. `spent` and `tool_calls` are the usage and the calls of the subagent so far.
    """

    call_id: str
    calls: list[PausedCall]
    state: bytes | None = None
    spent: UsageCost | UnsetType = UNSET
    tool_calls: int | UnsetType = UNSET


class CallResultEntry(_Entry, tag="Resulted", frozen=True):
    """The result of a call. `spent` is the usage of the models that the tool called, `tool_calls` their calls.

    `block_reason` is set if the consequence is that the run is blocked. `unresolved` are the unresolved calls of the
    subagent that the tool has run, if there are some, or were some before. `unresolved_key` is the idempotency key of
    the call if its own effect is not known.
    """

    call_id: str
    output: str | list[JsonObject]
    is_error: bool = False
    consequence: Consequence = field(default="", name="means")
    spent: UsageCost | None = None
    tool_calls: int | UnsetType = UNSET
    block_reason: str | UnsetType = UNSET
    unresolved: list[UnresolvedCall] | UnsetType = UNSET
    unresolved_key: str | UnsetType = UNSET


class HandoffEntry(_Entry, tag="HandedOff", frozen=True):
    """The result of a call by which the run goes over to the agent named `agent`. The call is the last of its turn.

    `history` is the history for this agent, if a filter has changed it. `drops_encrypted` is true if the agent uses
    another model, which cannot decrypt the earlier reasoning. `cost` is the cost of the usage since the last handoff,
    at the prices of the agent before.
    """

    call_id: str
    agent: str
    output: str | list[JsonObject]
    history: list[JsonObject] | UnsetType = UNSET
    drops_encrypted: bool = False
    cost: float | UnsetType = UNSET


class Verdict(Struct, frozen=True):
    """The decision of a person on a call. `reason` is for the model if the call is denied.

    `number` is that of the entry of the first run that recorded the verdict. A subagent to which the verdict is passed
    on more than once recognizes it by this number.
    """

    call_id: str
    approved: bool
    reason: str = ""
    number: int | UnsetType = UNSET


class ResumeEntry(_Entry, tag="Resumed", frozen=True):
    """A process resumes the run, with verdicts on its pending calls.

    `idle_seconds` is the time in which no process worked on the run, if it had not ended before.
    """

    at: float
    verdicts: list[Verdict] = field(default_factory=list, name="judged")
    idle_seconds: float | UnsetType = UNSET
    overrides: Overrides | UnsetType = UNSET


class TraceEntry(_Entry, tag="Traced", frozen=True):
    """The span of the process that executes the run, as a `traceparent` of the W3C."""

    traceparent: str


class SessionSaveEntry(_Entry, tag="SessionSaved", frozen=True):
    """The first `count` items of the run are in its session, which cannot replace them."""

    count: int


class EndEntry(_Entry, tag="Ended", frozen=True):
    """The end of a run. Runs of most kinds can be resumed after it. `cost` is set if the prices are known."""

    kind: str
    at: float
    error: RunError | None = None
    cost: float | UnsetType = UNSET
    currency: str | UnsetType = UNSET


Entry = (
    StartEntry
    | InputReplacedEntry
    | AnswerEntry
    | OutputReplacedEntry
    | FailedAttemptEntry
    | ArgumentsReplacedEntry
    | CallIntentEntry
    | CallPauseEntry
    | CallResultEntry
    | HandoffEntry
    | ResumeEntry
    | TraceEntry
    | SessionSaveEntry
    | EndEntry
)
