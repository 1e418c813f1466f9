"""The one loop: a model takes turns, its calls are made, until there is an answer, a decision, or a reason to stop.

Everything the loop knows is in the journal's state; each step reads it, does one thing, and writes down what came of
it. So a run can be left at any point, by a crash too, and gone on with from there.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

import msgspec

from antiphon.agent.calls import Calls, read_arguments
from antiphon.agent.entries import Answered, Ended, JsonObject
from antiphon.agent.gathering import LASTING
from antiphon.agent.journal import Journal
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

logger = logging.getLogger(__name__)

RunEvents = AsyncGenerator[RunEvent, None]

WRAP_UP = "No more tools can be called. Give your final answer now, with what you have."
_LONGEST_DELAY = 60.0


class _End(msgspec.Struct, frozen=True):
    """The run ends here."""

    kind: OutcomeKind
    output: Any = None
    pending: tuple[Call, ...] = ()
    error: RunError | None = None


class _Ask(msgspec.Struct, frozen=True):
    """The model takes another turn, and is told something for it. `last` is why it is the last, if it is."""

    told: str = ""
    last: str = ""
    repairs: bool = False

    @property
    def items(self) -> list[JsonObject]:
        return [{"role": "user", "content": self.told}] if self.told else []


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
        self._task = task
        self._clock = clock
        seconds = task.limits.seconds
        deadline = None if seconds is None else self._state.began_at + seconds
        self._stopwatch = Stopwatch(deadline, cancel, clock)
        self._calls = Calls(journal, executor, task, self._stopwatch, make_context=make_context)

    async def events(self) -> RunEvents:
        """What happens, as it happens; the last one tells how it ended."""
        try:
            async with aclosing(self._step_on()) as happening:
                async for event in happening:
                    yield event
        except Stop as stop:
            await self._calls.settle_rest()
            ended = await self._end(_End(stop.kind))
            for event in [*self._calls.drain(), ended]:
                yield event
        except AntiphonError as error:
            yield await self._end(_End("failed", error=RunError(error.code or error.type, error.message)))
        except (asyncio.CancelledError, GeneratorExit):
            # Nobody wants it any more, but what is left behind must still make sense.
            await asyncio.shield(self._abandon())
            raise
        finally:
            self._stopwatch.close()

    async def _abandon(self) -> None:
        if self._state.ended is not None:
            return
        try:
            await self._calls.settle_rest()
            await self._journal.write(Ended("cancelled", self._clock()))
        except Exception:
            # The run can be resumed all the same, as after a crash.
            logger.warning("the end of the run %s could not be written down", self._journal.run_id, exc_info=True)

    async def _step_on(self) -> RunEvents:
        while True:
            if self._state.open:
                self._stopwatch.check()
                async with aclosing(self._calls.make(has_room=self._has_room())) as happening:
                    async for event in happening:
                        yield event
            step = self._find_step()
            if isinstance(step, _End):
                yield await self._end(step)
                return
            self._stopwatch.check()
            if step.last:
                yield Notice(self._journal.run_id, f"{step.last}: the model is asked for its final answer")
            async with aclosing(self._take_turn(step)) as happening:
                async for event in happening:
                    yield event

    # What comes next follows from the state alone, so that it is the same when a run is resumed.

    def _has_room(self) -> bool:
        """Whether there will be a turn in which the model can read what its calls came to. A review makes them all."""
        turns = self._task.limits.turns
        if self._task.decision is not None:
            return True
        return not self._state.last and (turns is None or self._state.turns < turns)

    def _find_step(self) -> _End | _Ask:
        state, limits = self._state, self._task.limits
        if state.decided is not None:
            return _End("decision", read_arguments(state.decided))
        if self._calls.pending:
            return _End("needs_approval", pending=tuple(self._calls.pending))
        if state.last:
            return _End(cast(OutcomeKind, state.last), self._read_output())
        step = self._conclude() if state.turns and not state.calls else _Ask()
        if isinstance(step, _End):
            return step
        if limits.turns is not None and state.turns >= limits.turns:
            return _End("max_turns")
        limit = self._find_limit()
        if limit is None:
            return step
        return _Ask(WRAP_UP, last=limit) if limits.wrap_up else _End(limit)

    def _conclude(self) -> _End | _Ask:
        """What the last turn, which called nothing, amounts to."""
        text, cut = self._state.text, self._state.cut
        if not text.strip() and self._state.refusal:
            return _End("failed", error=RunError("refusal", self._state.refusal))
        if self._task.output is not None and (text.strip() or not cut):
            return self._judge_output(text)
        if cut:
            return _End("failed", error=RunError(cut, f"The answer was cut off: {cut}.", text))
        if not text.strip():
            return _End("no_progress")
        return _End("final", text) if self._task.nudge is None else _Ask(self._task.nudge)

    def _judge_output(self, text: str) -> _End | _Ask:
        """An answer that does not fit its type may be given once more."""
        assert self._task.output is not None
        try:
            return _End("final", self._task.output.read(text))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            reason = f"it was cut off ({self._state.cut})" if self._state.cut else str(error)
            if self._state.repairs:
                return _End(
                    "failed", error=RunError("invalid_output", f"The answer does not fit its type: {reason}", text)
                )
            return _Ask(f"Your answer does not fit: {reason}. Answer again, with nothing but the JSON.", repairs=True)

    def _read_output(self) -> Any:
        """The last answer of a run that had to end: it is taken if it fits."""
        if self._task.output is None:
            return self._state.text
        try:
            return self._task.output.read(self._state.text)
        except (msgspec.ValidationError, msgspec.DecodeError):
            return None

    def _find_limit(self) -> OutcomeKind | None:
        """Why the next turn is the last, or must not be taken at all."""
        limits, state = self._task.limits, self._state
        if not state.turns:
            return None
        if state.limit:
            return cast(OutcomeKind, state.limit)
        if limits.tokens is not None and state.usage.total_tokens >= limits.tokens:
            return "budget"
        if limits.cost is not None and self._task.prices is not None and self._cost() >= limits.cost:
            return "budget"
        is_last = limits.turns is not None and state.turns >= limits.turns - 1
        return "max_turns" if is_last and limits.wrap_up and state.calls else None

    def _cost(self) -> float:
        own = 0.0 if self._task.prices is None else self._task.prices.of(self._state.unpriced)
        return own + self._state.charged

    # Turns

    async def _take_turn(self, ask: _Ask) -> RunEvents:
        run_id, number = self._journal.run_id, self._state.turns + 1
        yield TurnStarted(run_id, number)
        attempt = 0
        answer: Answer | None = None
        while answer is None:
            try:
                async with aclosing(self._model.take_turn(self._state, ask.items, use_tools=not ask.last)) as turn:
                    while not isinstance(heard := await self._stopwatch.wait(turn.__anext__), Answer):
                        yield (TextDelta if heard.kind == "text" else ReasoningDelta)(run_id, heard.text)
                answer = heard
            except (ServerError, RateLimited) as error:
                # No tool was called for it yet, so the turn can be taken again.
                attempt += 1
                if attempt > self._task.turn_retries or not _passes(error):
                    raise
                yield TurnRestarted(run_id, number, error.message)
                await self._wait_out(error.retry_after or 0.0)
        await self._journal.write(
            Answered(
                answer.response_id if answer.continues else "",
                answer.output,
                answer.usage,
                ask.items,
                ask.last,
                ask.repairs,
                answer.cut,
            )
        )
        yield TurnFinished(run_id, number, answer.response_id, answer.usage)

    async def _wait_out(self, seconds: float) -> None:
        if seconds:
            await self._stopwatch.wait(lambda: asyncio.sleep(seconds))

    # The end

    async def _end(self, end: _End) -> RunEnded:
        if self._state.ended is None:
            await self._journal.write(Ended(end.kind, self._clock(), end.error))
        state = self._state
        outcome = Outcome(
            kind=end.kind,
            run_id=self._journal.run_id,
            output=end.output,
            text=state.text or state.refusal,
            usage=state.usage,
            turns=state.turns,
            tool_calls=state.tool_calls,
            cost=None if self._task.prices is None else self._cost(),
            pending=end.pending,
            error=end.error,
            history=tuple(state.history),
            state=None if end.kind in ("final", "decision") else self._journal.pack(),
        )
        return RunEnded(self._journal.run_id, outcome)


def _passes(error: AntiphonError) -> bool:
    """Whether the next attempt may do better."""
    return error.code not in LASTING and (error.retry_after or 0.0) <= _LONGEST_DELAY
