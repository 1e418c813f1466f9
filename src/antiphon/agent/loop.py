"""The one loop: a model takes turns, its calls are made, until there is an answer, a decision, or a reason to stop.

Everything the loop knows is in the journal's state; each step reads it, does one thing, and writes down what came of
it. So a run can be left at any point, by a crash too, and gone on with from there.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from antiphon.agent.calls import Calls
from antiphon.agent.journal import Answered, Ended, Journal, JsonObject
from antiphon.agent.model import Answer, Model
from antiphon.agent.outcome import (
    Notice,
    Outcome,
    OutcomeKind,
    ReasoningDelta,
    RunEnded,
    RunError,
    RunEvent,
    TextDelta,
    TurnFinished,
    TurnRestarted,
    TurnStarted,
)
from antiphon.agent.stopping import Stop, Stopwatch
from antiphon.agent.task import Task
from antiphon.errors import AntiphonError, RateLimited, ServerError
from antiphon.tools.base import Call, ToolContext
from antiphon.tools.execute import Executor

RunEvents = AsyncGenerator[RunEvent, None]

WRAP_UP = "No more tools can be called. Give your final answer now, with what you have."


class Loop:
    """Works on one run."""

    def __init__(
        self,
        journal: Journal,
        model: Model,
        executor: Executor,
        task: Task,
        *,
        make_context: Callable[..., ToolContext] = ToolContext,
        cancel: asyncio.Event | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self._model = model
        self._executor = executor
        self._task = task
        self._repairs = 0
        seconds = task.limits.seconds
        deadline = None if seconds is None else self._state.began_at + seconds
        self._stopwatch = Stopwatch(deadline, cancel, clock)
        self._calls = Calls(journal, executor, task, self._stopwatch, make_context=make_context)

    async def events(self) -> RunEvents:
        """What happens, as it happens; the last one tells how it ended."""
        try:
            async with aclosing(self._work()) as happening:
                async for event in happening:
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            # Nobody wants it any more, but what is left behind must still make sense.
            await asyncio.shield(self._abandon())
            raise

    async def _abandon(self) -> None:
        if self._state.ended is None:
            await self._calls.settle_cancelled()
            await self._journal.write(Ended("cancelled"))

    async def _work(self) -> RunEvents:
        try:
            async with aclosing(self._step_on()) as happening:
                async for event in happening:
                    yield event
        except Stop as stop:
            await self._calls.settle_cancelled()
            yield await self._end(_End(stop.kind))
        except AntiphonError as error:
            yield await self._end(_End("failed", error=RunError(error.code or error.type, error.message)))

    async def _step_on(self) -> RunEvents:
        while True:
            self._stopwatch.check()
            if self._state.open:
                async with aclosing(self._calls.make(has_room=self._has_room())) as happening:
                    async for event in happening:
                        yield event
            told: list[JsonObject] = []
            end = self._find_end(told)
            if end is not None:
                yield await self._end(end)
                return
            last = self._find_limit() or ""
            if last:
                yield Notice(self._journal.run_id, f"{last}: the model is asked for its final answer")
                told = [_say(WRAP_UP)]
            async with aclosing(self._take_turn(told, last=last)) as happening:
                async for event in happening:
                    yield event

    def _has_room(self) -> bool:
        """Whether there will be a turn in which the model can read what its calls came to."""
        turns = self._task.limits.turns
        return not self._state.last and (turns is None or self._state.turns < turns)

    def _find_end(self, told: list[JsonObject]) -> "_End | None":
        """How the run ends here, if it does. If not, what the model has to be told is put into `told`."""
        state, limits = self._state, self._task.limits
        if self._calls.decided is not None:
            return _End("decision", self._calls.decision)
        if self._calls.pending:
            return _End("needs_approval", pending=tuple(self._calls.pending))
        if state.last:
            return _End(cast(OutcomeKind, state.last), self._read_output(state.text))
        if state.turns and not state.calls:
            end = self._conclude(told)
            if end is not None:
                return end
        if state.turns and limits.turns is not None and state.turns >= limits.turns:
            return _End("max_turns")
        limit = self._find_limit()
        return _End(limit) if limit is not None and not limits.wrap_up else None

    # Turns

    async def _take_turn(self, told: Sequence[JsonObject], *, last: str) -> RunEvents:
        run_id, number = self._journal.run_id, self._state.turns + 1
        yield TurnStarted(run_id, number)
        attempt = 0
        answer: Answer | None = None
        while answer is None:
            try:
                async with aclosing(self._model.take_turn(self._state, told, use_tools=not last)) as turn:
                    while not isinstance(heard := await self._stopwatch.wait(anext(turn)), Answer):
                        yield (TextDelta if heard.kind == "text" else ReasoningDelta)(run_id, heard.text)
                answer = heard
            except (ServerError, RateLimited) as error:
                # No tool was called for it yet, so the turn can be taken again.
                attempt += 1
                if attempt > self._task.turn_retries or error.code in _LASTING:
                    raise
                yield TurnRestarted(run_id, number, error.message)
        await self._journal.write(Answered(answer.response_id, answer.output, answer.usage, list(told), last))
        yield TurnFinished(run_id, number, answer.response_id, answer.usage)

    def _conclude(self, told: list[JsonObject]) -> "_End | None":
        """What the last turn, which called nothing, amounts to."""
        text = self._state.text
        if not text.strip():
            return _End("no_progress")
        if self._task.nudge is not None:
            told.append(_say(self._task.nudge))
            return None
        if self._task.output is None:
            return _End("final", text)
        try:
            return _End("final", self._task.output.read(text))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            self._repairs += 1
            if self._repairs > 1:
                reason = RunError("invalid_output", f"The answer does not fit its type: {error}", text)
                return _End("failed", error=reason)
            told.append(_say(f"Your answer does not fit the schema: {error}. Answer again, with nothing but the JSON."))
            return None

    def _read_output(self, text: str) -> Any:
        if self._task.output is None:
            return text
        try:
            return self._task.output.read(text)
        except (msgspec.ValidationError, msgspec.DecodeError):
            return None

    # Limits and the end

    def _find_limit(self) -> OutcomeKind | None:
        """Why the next turn is the last, or must not be taken at all."""
        limits, state = self._task.limits, self._state
        if not state.turns:
            return None
        if self._calls.stuck:
            return "no_progress"
        if self._calls.exhausted or (limits.tokens is not None and state.usage.total_tokens >= limits.tokens):
            return "budget"
        if limits.cost is not None and self._task.prices is not None and self._cost() >= limits.cost:
            return "budget"
        is_last = limits.turns is not None and state.turns >= limits.turns - 1
        return "max_turns" if is_last and limits.wrap_up and state.calls else None

    def _cost(self) -> float:
        return 0.0 if self._task.prices is None else self._task.prices.of(self._state.usage)

    async def _end(self, end: "_End") -> RunEnded:
        if self._state.ended != end.kind:
            await self._journal.write(Ended(end.kind))
        state = self._state
        outcome = Outcome(
            kind=end.kind,
            run_id=self._journal.run_id,
            output=end.output,
            text=state.text,
            usage=state.usage,
            turns=state.turns,
            tool_calls=state.tool_calls,
            cost=None if self._task.prices is None else self._cost(),
            pending=end.pending,
            error=end.error,
            history=tuple(state.history),
            state=self._journal.pack(),
        )
        return RunEnded(self._journal.run_id, outcome)


class _End(msgspec.Struct, frozen=True):
    kind: OutcomeKind
    output: Any = None
    pending: tuple[Call, ...] = ()
    error: RunError | None = None


def _say(text: str) -> JsonObject:
    return {"role": "user", "content": text}


# Troubles that the next attempt will have as well.
_LASTING = ("insufficient_quota", "usage_limit_reached", "usage_not_included", "upstream_authentication")
