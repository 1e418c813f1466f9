"""How a run of an agent ends, and what is told on the way there."""

from typing import Any, Literal

from msgspec import Struct

from antiphon.protocol.response import Usage
from antiphon.tools.base import ToolInvocation

OutcomeKind = Literal[
    "final",
    "decision",
    "max_turns",
    "no_progress",
    "budget",
    "deadline",
    "cancelled",
    "needs_approval",
    "failed",
]


class RunError(Struct, frozen=True):
    """Why a run failed. `raw` is the text that did not validate, where that was the reason."""

    code: str
    message: str
    raw: str | None = None


class Outcome(Struct, frozen=True, kw_only=True):
    """What a run came to.

    `output` is the typed output of a `final` run, or the arguments of a `decision`; `text` is the last text.
    `pending` are the calls that wait for approval. `history` is the whole conversation as items, and can always be
    continued. `state` is what another process resumes the run from, if there is something to resume.
    """

    kind: OutcomeKind
    run_id: str
    output: Any = None
    text: str = ""
    usage: Usage
    turns: int
    tool_calls: int
    cost: float | None = None
    pending: tuple[ToolInvocation, ...] = ()
    error: RunError | None = None
    history: tuple[dict[str, Any], ...] = ()
    state: bytes | None = None


class RunEvent(Struct, tag_field="type"):
    """Something that happened in a run."""

    run_id: str


class TurnStarted(RunEvent, tag="turn.started"):
    number: int


class TurnRestarted(RunEvent, tag="turn.restarted"):
    """The turn broke off and is taken again from its beginning: what was shown of it is to be forgotten."""

    number: int
    reason: str


class TextDelta(RunEvent, tag="text.delta"):
    text: str


class ReasoningDelta(RunEvent, tag="reasoning.delta"):
    text: str


class ToolStarted(RunEvent, tag="tool.started"):
    call: ToolInvocation


class ToolProgress(RunEvent, tag="tool.progress"):
    call_id: str
    message: str


class ToolFinished(RunEvent, tag="tool.finished"):
    call: ToolInvocation
    output: Any
    is_error: bool


class TurnFinished(RunEvent, tag="turn.finished"):
    number: int
    response_id: str
    usage: Usage


class Notice(RunEvent, tag="notice"):
    """Something a person should know: a repeated call, a tool of that name that is not there, a limit that is near."""

    message: str


class RunEnded(RunEvent, tag="run.ended"):
    outcome: Outcome
