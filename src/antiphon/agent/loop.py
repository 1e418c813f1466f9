"""The one loop: a model takes turns, its calls are made, until there is an answer, a decision, or a reason to stop.

Everything the loop knows is in the journal's state; each step reads it, does one thing, and writes down what came of
it. So a run can be left at any point, by a crash too, and gone on with from there.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from antiphon.agent.budget import Budget, Stop, Stopwatch
from antiphon.agent.entries import Answered, Ended, Wasted
from antiphon.agent.journal import Journal
from antiphon.agent.model import Answer, Model, Remark, Spoken, Waste
from antiphon.agent.outcome import (
    Notice,
    Outcome,
    ReasoningDelta,
    RunEnded,
    RunError,
    RunEvent,
    TextDelta,
    TurnFinished,
    TurnRestarted,
    TurnStarted,
)
from antiphon.agent.steps import Ask, End, Steps
from antiphon.agent.task import Task
from antiphon.agent.tool_calls import Calls
from antiphon.agent.transports.base import LASTING
from antiphon.errors import AntiphonError, RateLimited, ServerError
from antiphon.protocol.response import Usage
from antiphon.tools.base import ToolContext
from antiphon.tools.executor import Executor

logger = logging.getLogger(__name__)

RunEvents = AsyncGenerator[RunEvent, None]

UNCOUNTED = "The server does not say how many tokens it took: they are estimated."
_LONGEST_DELAY = 60.0


class Loop:
    """Works on one run."""

    def __init__(
        self,
        journal: Journal,
        model: Model,
        executor: Executor,
        task: Task,
        *,
        budget: Budget | None = None,
        make_context: Callable[..., ToolContext] = ToolContext,
        cancel: asyncio.Event | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self._model = model
        self._task = task
        self._budget = budget or Budget(journal.state, task)
        self._steps = Steps(journal.state, task, self._budget)
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
            ended = await self._end(End(stop.kind))
            for event in [*self._calls.drain(), ended]:
                yield event
        except AntiphonError as error:
            yield await self._end(End("failed", error=RunError(error.code or error.type, error.message)))
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
                async with aclosing(self._calls.make(has_room=self._steps.has_room())) as happening:
                    async for event in happening:
                        yield event
            step = self._steps.find(self._calls.pending)
            if isinstance(step, End):
                yield await self._end(step)
                return
            self._stopwatch.check()
            if step.last:
                yield Notice(self._journal.run_id, f"{step.last}: the model is asked for its final answer")
            async with aclosing(self._take_turn(step)) as happening:
                async for event in happening:
                    yield event

    # Turns

    async def _take_turn(self, ask: Ask) -> RunEvents:
        run_id, number = self._journal.run_id, self._state.turns + 1
        yield TurnStarted(run_id, number)
        attempt = 0
        answer: Answer | None = None
        while answer is None:
            try:
                async with aclosing(self._model.take_turn(self._state, ask.items, use_tools=not ask.last)) as turn:
                    while not isinstance(heard := await self._stopwatch.wait(turn.__anext__), Answer):
                        if isinstance(heard, Spoken):
                            yield (TextDelta if heard.kind == "text" else ReasoningDelta)(run_id, heard.text)
                        else:
                            for notice in await self._take_note(heard):
                                yield notice
                answer = heard
            except (ServerError, RateLimited) as error:
                # No tool was called for it yet, so the turn can be taken again.
                attempt += 1
                if attempt > self._task.turn_retries or not _passes(error):
                    raise
                yield TurnRestarted(run_id, number, error.message)
                if self._is_spent(ask):
                    return
                await self._wait_out(error.retry_after or 0.0)
        for notice in self._tell_guess(answer.usage):
            yield notice
        await self._journal.write(
            Answered(
                answer.response_id if answer.continues else "",
                answer.output,
                answer.usage,
                ask.items,
                ask.last,
                ask.repairs,
                answer.cut,
                answer.unsealed,
            )
        )
        yield TurnFinished(run_id, number, answer.response_id, answer.usage)

    async def _take_note(self, heard: Remark | Waste) -> list[Notice]:
        if isinstance(heard, Remark):
            return [Notice(self._journal.run_id, heard.text)]
        told = self._tell_guess(heard.usage)
        await self._journal.write(Wasted(heard.usage))
        return told

    def _tell_guess(self, usage: Usage) -> list[Notice]:
        """Once, that the limits are held to by a guess from here on."""
        limits = self._task.limits
        matters = limits.tokens is not None or self._task.prices is not None
        is_news = usage.estimated and not self._state.usage.estimated
        return [Notice(self._journal.run_id, UNCOUNTED)] if matters and is_news else []

    def _is_spent(self, ask: Ask) -> bool:
        """Whether failed attempts have used up what there was. The last word comes on top, and may be tried again."""
        return not ask.last and (self._steps.find_limit() is not None or self._budget.is_used_up_above())

    async def _wait_out(self, seconds: float) -> None:
        if seconds:
            await self._stopwatch.wait(lambda: asyncio.sleep(seconds))

    # The end

    async def _end(self, end: End) -> RunEnded:
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
            cost=self._budget.cost,
            pending=end.pending,
            error=end.error,
            history=tuple(state.history),
            state=None if end.kind in ("final", "decision") else self._journal.pack(),
        )
        return RunEnded(self._journal.run_id, outcome)


def _passes(error: AntiphonError) -> bool:
    """Whether the next attempt may do better."""
    return error.code not in LASTING and (error.retry_after or 0.0) <= _LONGEST_DELAY
