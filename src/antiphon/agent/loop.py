"""The agent loop: the model takes turns and its calls run, until there is an answer, a decision, or a reason to stop.

The loop has no state besides the journal's. Each step reads that state, does one thing, and writes an entry. So a run
can be left at any point, also by a crash, and be resumed.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from antiphon.agent.budget import Budget, Stop, StopTimer
from antiphon.agent.entries import AnswerEntry, EndEntry, FailedAttemptEntry
from antiphon.agent.journal import Journal
from antiphon.agent.model import DeltaKind, FailedAttempt, ModelAnswer, ModelClient, ModelNotice
from antiphon.agent.outcome import (
    Notice,
    Outcome,
    ReasoningDelta,
    RunEnded,
    RunError,
    RunEvent,
    RunEvents,
    TextDelta,
    TurnFinished,
    TurnRestarted,
    TurnStarted,
)
from antiphon.agent.steps import End, NextTurn, Steps
from antiphon.agent.task import Task
from antiphon.agent.tool_calls import MakeContext, ToolCalls
from antiphon.errors import AntiphonError, RateLimited, ServerError
from antiphon.ledger import RunTaken
from antiphon.protocol.response import Usage
from antiphon.tools.base import ToolContext
from antiphon.tools.executor import Executor
from antiphon.upstream.error_mapping import PERMANENT_CODES

logger = logging.getLogger(__name__)

ESTIMATED = "The server reports no token usage: the usage is estimated."
_MAX_DELAY_SECONDS = 60.0
_DELTA_EVENTS: dict[DeltaKind, type[TextDelta | ReasoningDelta]] = {"text": TextDelta, "reasoning": ReasoningDelta}

_InternalEvents = AsyncGenerator[RunEvent | list[TextDelta | ReasoningDelta], None]
"""The events of a run. The deltas that were received together are one element."""


class Loop:
    """The execution of one run."""

    def __init__(
        self,
        journal: Journal,
        model: ModelClient,
        executor: Executor,
        task: Task,
        *,
        budget: Budget | None = None,
        make_context: MakeContext = ToolContext,
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
        deadline = None if seconds is None else self._state.started_at + seconds
        self._stop_timer = StopTimer(deadline, cancel, clock)
        self._calls = ToolCalls(
            journal, executor, task, self._stop_timer, budget=self._budget, make_context=make_context
        )

    async def events(self) -> RunEvents:
        """Execute the run and yield its events. The last one is RunEnded. Closing the generator cancels the run."""
        try:
            async with aclosing(self._run_steps()) as events:
                async for event in events:
                    if isinstance(event, RunEvent):
                        yield event
                        continue
                    for index, delta in enumerate(event):
                        if index:
                            self._stop_timer.check()
                        yield delta
        except Stop as stop:
            # Open calls stay open. When the run is resumed, it goes on as after a crash, with the same keys.
            ended = await self._end(End(stop.reason))
            for event in [*self._calls.drain_events(), ended]:
                yield event
        except RunTaken:
            # The run goes on in another process.
            raise
        except AntiphonError as error:
            yield await self._end(End("failed", error=RunError(error.code or error.type, error.message)))
        except (asyncio.CancelledError, GeneratorExit):
            # No reader is left, but the journal must still be valid.
            await asyncio.shield(self._end_cancelled())
            raise
        finally:
            self._stop_timer.close()

    async def _run_steps(self) -> _InternalEvents:
        while True:
            if self._state.open_calls:
                self._stop_timer.check()
                async with aclosing(self._calls.run(has_next_turn=self._steps.has_next_turn())) as events:
                    async for event in events:
                        yield event
            step = self._steps.choose(self._calls.pending)
            if isinstance(step, End):
                yield await self._end(step)
                return
            self._stop_timer.check()
            if step.last_turn_reason:
                yield Notice(self._journal.run_id, f"{step.last_turn_reason}: the model is asked for its final answer")
            async with aclosing(self._take_turn(step)) as turn:
                async for part in turn:
                    yield part

    # Turns

    async def _take_turn(self, step: NextTurn) -> _InternalEvents:
        run_id, number = self._journal.run_id, self._state.turns + 1
        yield TurnStarted(run_id, number)
        attempt = 0
        answer: ModelAnswer | None = None
        use_tools = not step.last_turn_reason
        while answer is None:
            try:
                async with aclosing(self._model.take_turn(self._state, step.items, use_tools=use_tools)) as turn:
                    while not isinstance(part := await self._stop_timer.wait(turn.__anext__), ModelAnswer):
                        if isinstance(part, ModelNotice | FailedAttempt):
                            for notice in await self._handle_notice(part):
                                yield notice
                        else:
                            yield [_DELTA_EVENTS[delta.kind](run_id, delta.text) for delta in part]
                answer = part
            except (ServerError, RateLimited) as error:
                # No tool was called yet, so the turn can be repeated.
                attempt += 1
                if attempt > self._task.turn_retries or not _is_retryable(error):
                    raise
                yield TurnRestarted(run_id, number, error.message)
                if self._is_budget_used_up(step):
                    return
                await self._wait(error.retry_after or 0.0)
        for notice in self._find_estimate_notices(answer.usage):
            yield notice
        await self._journal.write(_make_entry(answer, step))
        yield TurnFinished(run_id, number, answer.response_id, answer.usage)

    async def _handle_notice(self, part: ModelNotice | FailedAttempt) -> list[Notice]:
        if isinstance(part, ModelNotice):
            return [Notice(self._journal.run_id, part.text)]
        notices = self._find_estimate_notices(part.usage)
        await self._journal.write(FailedAttemptEntry(part.usage))
        return notices

    def _find_estimate_notices(self, usage: Usage) -> list[Notice]:
        """Return a notice if the limits depend on an estimated usage for the first time."""
        depends = self._task.limits.tokens is not None or self._task.prices is not None
        is_first = usage.estimated and not self._state.usage.estimated
        return [Notice(self._journal.run_id, ESTIMATED)] if depends and is_first else []

    def _is_budget_used_up(self, step: NextTurn) -> bool:
        """Return True if failed attempts have used up the budget. The last turn is not subject to it."""
        if step.last_turn_reason:
            return False
        return self._steps.find_limit() is not None or self._budget.is_parent_used_up()

    async def _wait(self, seconds: float) -> None:
        if seconds:
            await self._stop_timer.wait(lambda: asyncio.sleep(seconds))

    # The end

    async def _end(self, end: End) -> RunEnded:
        if self._state.ended is None:
            await self._journal.write(EndEntry(end.kind, self._clock(), end.error))
        state = self._state
        outcome = Outcome(
            kind=end.kind,
            run_id=self._journal.run_id,
            output=end.output,
            text=state.text or state.refusal,
            usage=self._budget.usage,
            turns=state.turns,
            tool_calls=self._budget.tool_calls,
            cost=self._budget.cost,
            pending=end.pending,
            abandoned=tuple(self._calls.abandoned),
            error=end.error,
            history=tuple(state.history if end.pending else self._calls.close_history()),
            state=None if end.kind in ("final", "decision") else self._journal.pack(),
        )
        return RunEnded(self._journal.run_id, outcome)

    async def _end_cancelled(self) -> None:
        if self._state.ended is not None:
            return
        try:
            await self._journal.write(EndEntry("cancelled", self._clock()))
        except Exception:
            # The run can still be resumed, as after a crash.
            logger.warning("cannot write the end of the run %s", self._journal.run_id, exc_info=True)


def _make_entry(answer: ModelAnswer, step: NextTurn) -> AnswerEntry:
    return AnswerEntry(
        answer.response_id if answer.can_continue else "",
        answer.output,
        answer.usage,
        step.items,
        step.last_turn_reason,
        step.repairs_output,
        answer.incomplete_reason,
        answer.drops_encrypted,
    )


def _is_retryable(error: AntiphonError) -> bool:
    """Return True if another attempt may succeed."""
    return error.code not in PERMANENT_CODES and (error.retry_after or 0.0) <= _MAX_DELAY_SECONDS
