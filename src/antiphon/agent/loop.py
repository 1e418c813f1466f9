"""The agent loop: the model takes turns and its calls run, until there is an answer, a decision, or a reason to stop.

The loop has no state besides the journal's. Each step reads that state, does one thing, and writes an entry. So a run
can be left at any point, even by a crash, and be resumed.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from antiphon.agent.budget import Budget, Stop, StopTimer
from antiphon.agent.entries import (
    AnswerEntry,
    EndEntry,
    FailedAttemptEntry,
    InputReplacedEntry,
    OutputReplacedEntry,
)
from antiphon.agent.guardrails import Blocked, InputCheck, OutputCheck, encode_output
from antiphon.agent.journal import Journal
from antiphon.agent.model_answer import (
    CallDelta,
    DeltaKind,
    FailedAttempt,
    ModelAnswer,
    ModelDelta,
    ModelNotice,
    RawModelEvent,
    TurnPart,
)
from antiphon.agent.outcome import (
    AgentChanged,
    ArgumentsDelta,
    ModelEvent,
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
from antiphon.agent.participants import FindParticipant, Participant
from antiphon.agent.resume import FINISHED
from antiphon.agent.steps import BLOCKED_OUTPUT, End, NextTurn, Steps, make_blocked_end
from antiphon.agent.tool_calls import MakeContext, ToolCalls
from antiphon.errors import AntiphonError, RateLimited, ServerError
from antiphon.ledger import RunTaken
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage
from antiphon.tools.base import ModelRetry, ToolContext
from antiphon.tools.executor import replace_surrogates
from antiphon.upstream.error_mapping import PERMANENT_CODES

logger = logging.getLogger(__name__)

ESTIMATED = "The server reports no token usage: the usage is estimated."
_MAX_DELAY_SECONDS = 60.0
_DELTA_EVENTS: dict[DeltaKind, type[TextDelta | ReasoningDelta]] = {"text": TextDelta, "reasoning": ReasoningDelta}

# The kinds of outcomes that have no answer of the model to check.
_UNCHECKED_ENDS = ("decision", "needs_approval", "blocked")

_InternalEvents = AsyncGenerator[RunEvent | list[RunEvent], None]
"""The events of a run. The deltas that were received together are one element."""


class Loop:
    """The execution of one run."""

    def __init__(
        self,
        journal: Journal,
        participant: Participant,
        *,
        find_participant: FindParticipant | None = None,
        budget: Budget | None = None,
        make_context: MakeContext = ToolContext,
        cancel: asyncio.Event | None = None,
        deps: Any = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self._participant = participant
        self._find_participant = find_participant or (lambda _: participant)
        self._active_agent = self._state.agent
        self._withholds_answer = False
        """True while the last answer is not checked by the output guardrails."""
        self._budget = budget or Budget(journal.state, participant.task)
        self._steps = Steps(journal.state, participant.task, self._budget)
        self._clock = clock
        self._deps = deps
        seconds = participant.task.limits.seconds
        deadline = None if seconds is None else self._state.started_at + seconds
        self._stop_timer = StopTimer(deadline, cancel, clock)
        self._calls = ToolCalls(
            journal,
            participant,
            self._stop_timer,
            budget=self._budget,
            make_context=make_context,
            find_participant=self._find_participant,
            deps=deps,
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
        except RunTaken:
            # The run goes on in another process.
            raise
        except (Stop, Blocked, AntiphonError) as reason:
            # Open calls stay open. When the run is resumed, it goes on as after a crash, with the same keys.
            await self._record_interrupted()
            ended = await self._end(_make_end(reason))
            for event in [*self._calls.drain_events(), ended]:
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            # No reader is left, but the journal must still be valid.
            await asyncio.shield(self._end_cancelled())
            raise
        finally:
            self._stop_timer.close()
            await self._stop_timer.end_dependency()

    async def _begin(self) -> AgentChanged | None:
        """Check the input of a new run. Return the event of the handoff of a resumed one, if there was a handoff."""
        if self._participant.guardrails.input:
            await self._check_input()
        changed = self._change_agent() if self._state.active_agent != self._active_agent else None
        if self._state.open_calls and self._state.ended is None:
            # The calls need the tools of their turn.
            await self._prepare_turn()
        return changed

    async def _prepare_turn(self) -> None:
        if self._participant.prepare is not None:
            await self._stop_timer.wait(self._participant.prepare)

    def close_history(self) -> list[JsonObject]:
        """Return the conversation with an output for each open call, and without an answer that is withheld."""
        state = self._state
        error = None if state.ended is None else state.ended.error
        if self._withholds_answer or (error is not None and error.code == BLOCKED_OUTPUT):
            return state.conversation_before_answer
        return self._calls.close_history()

    async def _run_steps(self) -> _InternalEvents:
        changed = await self._begin()
        if changed is not None:
            yield changed
        while True:
            if self._state.open_calls and self._state.ended is None:
                self._stop_timer.check()
                async with aclosing(self._calls.run(has_next_turn=self._steps.has_next_turn())) as events:
                    async for event in events:
                        yield event
                if self._state.active_agent != self._active_agent:
                    yield self._change_agent()
            step = await self._choose_step()
            if isinstance(step, End):
                yield await self._end(step)
                return
            self._stop_timer.check()
            await self._prepare_turn()
            if step.last_turn_reason:
                yield Notice(self._journal.run_id, f"{step.last_turn_reason}: the model is asked for its final answer")
            async with aclosing(self._take_turn(step)) as turn:
                async for part in turn:
                    yield part

    async def _choose_step(self) -> End | NextTurn:
        step = self._steps.choose(self._calls.pending)
        return await self._check_output(step) if self._participant.guardrails.output else step

    def _change_agent(self) -> AgentChanged:
        """Go on as the agent to which the run was handed over."""
        before, self._active_agent = self._active_agent, self._state.active_agent
        self._participant = self._calls.participant = self._find_participant(self._active_agent)
        self._steps = Steps(self._state, self._participant.task, self._budget)
        self._budget.change_prices(self._participant.task.prices)
        return AgentChanged(self._journal.run_id, before, self._active_agent)

    # Guardrails

    async def _check_input(self) -> None:
        """Check the input of a run that has had no turn yet."""
        if self._state.turns or self._state.ended is not None:
            return
        run_id, name = self._journal.run_id, self._participant.name
        check = InputCheck(run_id=run_id, agent=name, deps=self._deps, items=self._state.history)
        replaced = await self._stop_timer.wait(partial(self._participant.guardrails.check_input, check))
        if replaced is not None:
            await self._journal.write(InputReplacedEntry(replaced))
        if self._participant.guardrails.has_parallel:
            check = msgspec.structs.replace(check, items=list(self._state.history))
            self._stop_timer.depend_on(self._participant.guardrails.check_input_in_parallel(check))

    async def _check_output(self, end: End | NextTurn) -> End | NextTurn:
        """Return the step after the output guardrails."""
        state, participant = self._state, self._participant
        if isinstance(end, NextTurn) or end.kind in _UNCHECKED_ENDS:
            return end
        has_open_turn = state.calls and state.final_call is None
        if state.ended is not None or has_open_turn or not state.answer:
            return end
        check = OutputCheck(
            run_id=self._journal.run_id,
            agent=participant.name,
            deps=self._deps,
            output=end.output,
            text=state.answer,
            retries=state.output_repairs,
        )
        # If the run ends during the check, the outcome must not have the answer.
        self._withholds_answer = True
        try:
            replaced = await self._stop_timer.wait(partial(participant.guardrails.check_output, check))
        except ModelRetry as retry:
            self._withholds_answer = False
            return self._steps.send_back(end, replace_surrogates(str(retry)))
        if replaced is not None:
            await self._journal.write(OutputReplacedEntry(encode_output(participant.task, replaced.value)))
        self._withholds_answer = False
        return end if replaced is None else end.replace_output(replaced.value)

    # Turns

    async def _take_turn(self, step: NextTurn) -> _InternalEvents:
        run_id, number = self._journal.run_id, self._state.turns + 1
        yield TurnStarted(run_id, number)
        attempt = 0
        answer: ModelAnswer | None = None
        use_tools = not step.last_turn_reason
        while answer is None:
            try:
                async with aclosing(
                    self._participant.model.take_turn(self._state, step.items, use_tools=use_tools)
                ) as turn:
                    read: Callable[[], Awaitable[TurnPart]] = turn.__anext__
                    if not self._stop_timer.is_unused:
                        read = partial(self._stop_timer.wait, read)
                    while not isinstance(part := await read(), ModelAnswer):
                        if isinstance(part, ModelNotice | FailedAttempt):
                            for notice in await self._handle_notice(part):
                                yield notice
                        else:
                            yield [
                                _DELTA_EVENTS[delta.kind](run_id, delta.text)
                                if isinstance(delta, ModelDelta)
                                else _make_event(run_id, delta)
                                for delta in part
                            ]
                answer = part
            except (ServerError, RateLimited) as error:
                # No tool was called yet, so the turn can be repeated.
                attempt += 1
                if attempt > self._participant.task.turn_retries or not _is_retryable(error):
                    raise
                yield TurnRestarted(run_id, number, error.message)
                if self._is_budget_used_up(step):
                    return
                await self._wait(error.retry_after or 0.0)
        for notice in self._find_estimate_notices(answer.usage):
            yield notice
        await self._settle_guardrails(answer)
        await self._journal.write(_make_entry(answer, step))
        yield TurnFinished(run_id, number, answer.response_id, answer.usage)

    async def _settle_guardrails(self, answer: ModelAnswer) -> None:
        """Wait for the parallel guardrails before the answer is used. An answer to a refused input still costs."""
        try:
            await self._stop_timer.settle()
        except (Blocked, AntiphonError):
            await self._journal.write(FailedAttemptEntry(answer.usage))
            raise

    async def _handle_notice(self, part: ModelNotice | FailedAttempt) -> list[Notice]:
        if isinstance(part, ModelNotice):
            return [Notice(self._journal.run_id, part.text)]
        notices = self._find_estimate_notices(part.usage)
        await self._journal.write(FailedAttemptEntry(part.usage))
        return notices

    def _find_estimate_notices(self, usage: Usage) -> list[Notice]:
        """Return a notice if the limits depend on an estimated usage for the first time."""
        depends = self._participant.task.limits.tokens is not None or self._participant.task.prices is not None
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
            cost, currency = self._budget.cost, self._budget.currency
            spent = (msgspec.UNSET, msgspec.UNSET) if cost is None or currency is None else (cost, currency)
            await self._journal.write(EndEntry(end.kind, self._clock(), end.error, *spent))
        state = self._state
        outcome = Outcome(
            kind=end.kind,
            run_id=self._journal.run_id,
            agent=state.active_agent,
            output=end.output,
            text="" if end.kind == "blocked" or self._withholds_answer else state.answer or state.refusal,
            usage=self._budget.usage,
            turns=state.turns,
            tool_calls=self._budget.tool_calls,
            cost=self._budget.cost,
            currency=self._budget.currency,
            pending=end.pending,
            abandoned=tuple(self._calls.abandoned),
            error=end.error,
            history=tuple(state.conversation if end.pending else self.close_history()),
            state=None if end.kind in FINISHED else self._journal.pack(),
        )
        return RunEnded(self._journal.run_id, outcome)

    async def _record_interrupted(self) -> None:
        """Record the usage of a turn that was stopped before its end."""
        usage = self._participant.model.interrupted_usage
        if usage.total_tokens:
            await self._journal.write(FailedAttemptEntry(usage))

    async def _end_cancelled(self) -> None:
        if self._state.ended is not None:
            return
        try:
            await self._record_interrupted()
            await self._journal.write(EndEntry("cancelled", self._clock()))
        except Exception:
            # The run can still be resumed, as after a crash.
            logger.warning("cannot write the end of the run %s", self._journal.run_id, exc_info=True)


def _make_end(reason: Stop | Blocked | AntiphonError) -> End:
    """Return the end of a run that an exception has left."""
    match reason:
        case Stop():
            return End(reason.reason)
        case Blocked():
            return make_blocked_end(reason.stage, reason.reason)
        case _:
            # The message may quote an exception of a function, with a file name that is not UTF-8.
            return End("failed", error=RunError(reason.code or reason.type, replace_surrogates(reason.message)))


def _make_event(run_id: str, delta: CallDelta | RawModelEvent) -> RunEvent:
    if isinstance(delta, RawModelEvent):
        return ModelEvent(run_id, delta.event)
    return ArgumentsDelta(run_id, delta.call_id, delta.name, delta.text)


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
        list(answer.native_calls) or UNSET,
    )


def _is_retryable(error: AntiphonError) -> bool:
    """Return True if another attempt may succeed."""
    return error.code not in PERMANENT_CODES and (error.retry_after or 0.0) <= _MAX_DELAY_SECONDS
