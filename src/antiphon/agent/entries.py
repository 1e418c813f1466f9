"""The entries of a run's journal: what was about to be done, and what has been done."""

from typing import Literal

from msgspec import Struct

from antiphon.agent.outcome import RunError
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage
from antiphon.tools.base import ToolInvocation, UsageCost


class _Entry(Struct, tag_field="entry", frozen=True):
    pass


class Began(_Entry, frozen=True):
    """The run's input, and who is to work on it."""

    agent: str
    input: list[JsonObject]
    at: float


class Answered(_Entry, frozen=True):
    """A turn of the model. `told` is what it was told for it in addition: a nudge, or why its answer was not taken.

    `last` is why this turn was the run's last one, without tools; empty for all others. `repairs` says that it was
    asked to answer again in the right form. `cut` is why the answer was cut off, if it was. `unsealed` says that the
    server could not read the sealed reasoning before it, which was left out from then on.
    """

    response_id: str
    output: list[JsonObject]
    usage: Usage
    told: list[JsonObject] = []
    last: str = ""
    repairs: bool = False
    cut: str = ""
    unsealed: bool = False


class Wasted(_Entry, frozen=True):
    """What an attempt at a turn took that came to nothing."""

    usage: Usage


class Intended(_Entry, frozen=True):
    """A call is about to be made. What was said about it before is used up by this."""

    call_id: str


class Paused(_Entry, frozen=True):
    """A call cannot go on before somebody has judged `calls` of its own. It is made again then, and given `state`."""

    call_id: str
    calls: list[ToolInvocation]
    state: bytes | None = None


Meaning = Literal["", "decision", "no_progress", "budget"]


class Resulted(_Entry, frozen=True):
    """What a call came to. `means` is what follows from it for the run: the decision, or that no more may be called.

    `spent` is what models have taken for it.
    """

    call_id: str
    output: str | list[JsonObject]
    is_error: bool = False
    means: Meaning = ""
    spent: UsageCost | None = None


class Judgement(Struct, frozen=True):
    """Whether a call may be made. `reason` is for the model, if it may not."""

    call_id: str
    approved: bool
    reason: str = ""


class Resumed(_Entry, frozen=True):
    """A process goes on with the run, and what somebody has said meanwhile about its pending calls."""

    at: float
    judged: list[Judgement] = []


class Ended(_Entry, frozen=True):
    """The run is over, and how; or it has stopped, and may be resumed."""

    kind: str
    at: float
    error: RunError | None = None


Entry = Began | Answered | Wasted | Intended | Paused | Resulted | Resumed | Ended
