"""What comes next in a run. It follows from the state alone, so that it is the same when a run is resumed."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from antiphon.agent.budget import Budget
from antiphon.agent.journal import State
from antiphon.agent.outcome import OutcomeKind, RunError
from antiphon.agent.task import Task
from antiphon.agent.tool_calls import read_arguments
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.base import ToolInvocation

WRAP_UP = "No more tools can be called. Give your final answer now, with what you have."


class End(msgspec.Struct, frozen=True):
    """The run ends here."""

    kind: OutcomeKind
    output: Any = None
    pending: tuple[ToolInvocation, ...] = ()
    error: RunError | None = None


class Ask(msgspec.Struct, frozen=True):
    """The model takes another turn, and is told something for it. `last` is why it is the last, if it is."""

    told: str = ""
    last: str = ""
    repairs: bool = False

    @property
    def items(self) -> list[JsonObject]:
        return [{"role": "user", "content": self.told}] if self.told else []


class Steps:
    """Reads from the state of a run what to do now."""

    def __init__(self, state: State, task: Task, budget: Budget) -> None:
        self._state = state
        self._task = task
        self._budget = budget

    def has_room(self) -> bool:
        """Whether there will be a turn in which the model can read what its calls came to. A review makes them all."""
        turns = self._task.limits.turns
        if self._task.decision is not None:
            return True
        if self._state.last or self._budget.is_used_up_above():
            return False
        return turns is None or self._state.turns < turns

    def find(self, pending: Sequence[ToolInvocation]) -> End | Ask:
        """The next step, with the calls that wait for approval."""
        state, limits = self._state, self._task.limits
        if state.decided is not None:
            return End("decision", read_arguments(state.decided))
        if pending:
            return End("needs_approval", pending=tuple(pending))
        if state.last:
            return End(cast(OutcomeKind, state.last), self._read_output())
        step = self._conclude() if state.turns and not state.calls else Ask()
        if isinstance(step, End):
            return step
        if limits.turns is not None and state.turns >= limits.turns:
            return End("max_turns")
        if self._budget.is_used_up_above():
            # Whoever asked has the last word on what is left.
            return End("budget")
        limit = self.find_limit()
        if limit is None:
            return step
        return Ask(WRAP_UP, last=limit) if limits.wrap_up else End(limit)

    def find_limit(self) -> OutcomeKind | None:
        """Why the next turn is the last, or must not be taken at all."""
        limits, state = self._task.limits, self._state
        if not state.turns and not state.usage.total_tokens:
            return None
        if state.limit:
            return cast(OutcomeKind, state.limit)
        if self._budget.is_used_up():
            return "budget"
        is_last = limits.turns is not None and state.turns >= limits.turns - 1
        return "max_turns" if is_last and limits.wrap_up and state.calls else None

    def _conclude(self) -> End | Ask:
        """What the last turn, which called nothing, amounts to."""
        text, cut = self._state.text, self._state.cut
        if not text.strip() and self._state.refusal:
            return End("failed", error=RunError("refusal", self._state.refusal))
        if self._task.output is not None and (text.strip() or not cut):
            return self._judge_output(text)
        if cut:
            return End("failed", error=RunError(cut, f"The answer was cut off: {cut}.", text))
        if not text.strip():
            return End("no_progress")
        return End("final", text) if self._task.nudge is None else Ask(self._task.nudge)

    def _judge_output(self, text: str) -> End | Ask:
        """An answer that does not fit its type may be given once more."""
        assert self._task.output is not None
        try:
            return End("final", self._task.output.read(text))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            reason = f"it was cut off ({self._state.cut})" if self._state.cut else str(error)
            if self._state.repairs:
                return End(
                    "failed", error=RunError("invalid_output", f"The answer does not fit its type: {reason}", text)
                )
            return Ask(f"Your answer does not fit: {reason}. Answer again, with nothing but the JSON.", repairs=True)

    def _read_output(self) -> Any:
        """The last answer of a run that had to end: it is taken if it fits."""
        if self._task.output is None:
            return self._state.text
        try:
            return self._task.output.read(self._state.text)
        except (msgspec.ValidationError, msgspec.DecodeError):
            return None
