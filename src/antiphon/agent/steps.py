"""The next step of a run. It depends on the state alone, so a resumed run takes the same step."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from antiphon.agent.approvals import read_arguments
from antiphon.agent.budget import Budget
from antiphon.agent.outcome import OutcomeKind, RunError
from antiphon.agent.run_state import RunState
from antiphon.agent.task import Task
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.base import PendingToolCall, ToolInvocation

CONTINUE = "The limit was raised, and tools can be called again. Go on with the task."
BLOCKED_OUTPUT = "output_guardrail"
"""The code of the error if a guardrail has stopped the run because of its output."""

WRAP_UP = "No more tools can be called. Give your final answer now, with what you have."


class End(msgspec.Struct, frozen=True):
    """The run ends."""

    kind: OutcomeKind
    output: Any = None
    pending: tuple[PendingToolCall, ...] = ()
    error: RunError | None = None

    def replace_output(self, output: Any) -> "End":
        """Return the end with another output. The error may have the first one."""
        error = None if self.error is None else msgspec.structs.replace(self.error, raw=None)
        return msgspec.structs.replace(self, output=None if self.kind == "failed" else output, error=error)


class NextTurn(msgspec.Struct, frozen=True):
    """The model takes another turn.

    `message` is a user message for this turn. `last_turn_reason` is set if it is the last one, without tools.
    `repairs_output` is True if the model repeats an invalid answer.
    """

    message: str = ""
    last_turn_reason: str = ""
    repairs_output: bool = False

    @property
    def items(self) -> list[JsonObject]:
        return [{"role": "user", "content": self.message}] if self.message else []


def make_blocked_end(stage: str, reason: str) -> End:
    """Return the end of a run that a guardrail has stopped."""
    return End("blocked", error=RunError(f"{stage}_guardrail", reason))


class Steps:
    """Chooses the next step from the state of a run."""

    def __init__(self, state: RunState, task: Task, budget: Budget) -> None:
        self._state = state
        self._task = task
        self._budget = budget

    def has_next_turn(self) -> bool:
        """Return True if the model gets a turn to read the results of its calls, or if the run ends by a decision."""
        turns = self._task.limits.turns
        if self._task.decision is not None:
            return True
        if self._state.last_turn_reason or self._budget.is_parent_used_up():
            return False
        return turns is None or self._state.turns < turns or self._task.limits.wrap_up

    def choose(self, pending: Sequence[PendingToolCall]) -> End | NextTurn:
        """Return the next step. `pending` are the calls that wait for a person."""
        state = self._state
        if state.ended is not None and state.ended.kind == "blocked":
            return End("blocked", error=state.ended.error)
        if state.block_reason:
            return make_blocked_end("result", state.block_reason)
        if state.decision is not None:
            return End("decision", read_arguments(state.decision))
        if pending:
            return End("needs_approval", pending=tuple(pending))
        if state.final_call is not None:
            return self._evaluate_final_call(state.final_call)
        if state.last_turn_reason:
            if state.last_turn_reason in ("max_turns", "budget") and self.find_limit() is None:
                # The run was resumed with a higher limit.
                return NextTurn(CONTINUE)
            return End(cast(OutcomeKind, state.last_turn_reason), self._parse_last_output())
        if state.invalid_output and state.output_repairs > self._task.output_retries:
            message = "The answer does not match the output type: see the output of the last call."
            return End("failed", error=RunError("invalid_output", message, state.invalid_output))
        step = self._evaluate_answer() if state.turns and not state.calls else NextTurn()
        return step if isinstance(step, End) else self.limit(step)

    def limit(self, step: NextTurn) -> End | NextTurn:
        """Return the step, or another one if a limit is reached."""
        limits = self._task.limits
        if self._budget.is_parent_used_up():
            # The parent run uses the remaining turn for its own answer.
            return End("budget")
        limit = self.find_limit()
        if limit is None:
            return step
        return NextTurn(WRAP_UP, last_turn_reason=limit) if limits.wrap_up else End(limit)

    def find_limit(self) -> OutcomeKind | None:
        """Return the limit because of which the next turn is the last, or is not taken."""
        limits, state = self._task.limits, self._state
        if not state.turns and not state.usage.total_tokens:
            return None
        if state.limit_reached == "no_progress":
            return "no_progress"
        if self._budget.is_used_up() or (state.limit_reached == "budget" and not self._budget.has_calls_left()):
            return "budget"
        return "max_turns" if limits.turns is not None and state.turns >= limits.turns else None

    def _evaluate_answer(self) -> End | NextTurn:
        """Return the step after a turn without calls."""
        text, incomplete_reason = self._state.text, self._state.incomplete_reason
        if not text.strip() and self._state.refusal:
            return End("failed", error=RunError("refusal", self._state.refusal))
        if self._task.output is not None and (text.strip() or not incomplete_reason):
            return self._evaluate_output(text)
        if incomplete_reason:
            error = RunError(incomplete_reason, f"The answer was cut off: {incomplete_reason}.", text)
            # With a text it is an answer, which a limit of the model or of the user has cut off.
            return End("incomplete", text, error=error) if text.strip() else End("failed", error=error)
        if not text.strip():
            return End("no_progress")
        return End("final", text) if self._task.reminder is None else NextTurn(self._task.reminder)

    def _evaluate_final_call(self, call: ToolInvocation) -> End:
        """Return the end after a call whose result, or whose arguments, are the answer."""
        state = self._state
        kind = cast(OutcomeKind, state.last_turn_reason or "final")
        try:
            return End(kind, self._parse_final_call(call))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            message = f"The result of the tool '{call.name}' does not match the output type: {error}"
            return End("failed", error=RunError("invalid_output", message, state.answer))

    def _parse_final_call(self, call: ToolInvocation) -> Any:
        state, output = self._state, self._task.output
        if output is None:
            return state.answer
        if state.replaced_output is not None:
            return output.parse(state.replaced_output)
        if call.call_id in state.output_calls:
            return output.parse_call(call.name, call.arguments)
        return output.parse_result(state.answer)

    def _evaluate_output(self, text: str) -> End | NextTurn:
        """Parse the answer. The model may repeat an invalid one."""
        assert self._task.output is not None
        try:
            return End("final", self._task.output.parse(text))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            incomplete_reason = self._state.incomplete_reason
            reason = f"it was cut off ({incomplete_reason})" if incomplete_reason else str(error)
            if self._state.output_repairs >= self._task.output_retries:
                message = f"The answer does not match the output type: {reason}"
                return End("failed", error=RunError("invalid_output", message, text))
            how = "by calling a tool for it" if self._task.output.tools else "with nothing but the JSON"
            message = f"Your answer does not fit: {reason}. Answer again, {how}."
            return NextTurn(message, repairs_output=True)

    def send_back(self, end: End, message: str) -> End | NextTurn:
        """Return the step after an output guardrail has asked for another answer."""
        if end.kind != "final":
            # There is no other turn.
            return msgspec.structs.replace(end, output=None)
        if self._state.output_repairs >= self._task.output_retries:
            error = RunError("invalid_output", f"The answer was not accepted: {message}", self._state.answer)
            return End("failed", error=error)
        return self.limit(NextTurn(message, repairs_output=True))

    def _parse_last_output(self) -> Any:
        """Return the output of a last turn; None if it does not match the output type."""
        if self._task.output is None:
            return self._state.text
        try:
            return self._task.output.parse(self._state.text)
        except (msgspec.ValidationError, msgspec.DecodeError):
            return None
