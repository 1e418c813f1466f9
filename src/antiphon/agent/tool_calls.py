"""The tool calls of a turn: run them concurrently, refuse them, or leave them pending for approval.

The journal has an entry before each call and one after it, so that a crash loses no result and no call runs twice
unnoticed.
"""

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType, structs

from antiphon.agent.approvals import DENIED, needs_approval
from antiphon.agent.budget import Budget, StopTimer
from antiphon.agent.entries import (
    ArgumentsReplacedEntry,
    CallIntentEntry,
    CallPauseEntry,
    CallResultEntry,
    Consequence,
    HandoffEntry,
    PausedCall,
    UnresolvedCall,
)
from antiphon.agent.guardrails import Blocked, CallCheck, ResultCheck
from antiphon.agent.handoffs import SECOND_HANDOFF, Handoff
from antiphon.agent.history import make_output_item, make_output_items
from antiphon.agent.journal import Journal
from antiphon.agent.loop_guard import STOP_AT, STOPPED, WARN_AT, add_warning, make_signature
from antiphon.agent.outcome import Notice, RunEvent, ToolFinished, ToolProgress, ToolStarted
from antiphon.agent.participants import FindParticipant, Participant
from antiphon.agent.resume import INTERRUPTED, is_interrupted
from antiphon.agent.task import Task
from antiphon.agent.unresolved_calls import list_unresolved
from antiphon.ledger import defer_cancellation
from antiphon.protocol.json_text import JsonObject
from antiphon.tasks import cancel_tasks
from antiphon.tools.base import (
    ApprovalRequired,
    MissingTool,
    ModelRetry,
    PendingReason,
    PendingToolCall,
    Tool,
    ToolContext,
    ToolInvocation,
    ToolResult,
)
from antiphon.tools.executor import CallObserver, Executor, add_to_error, make_error_result, replace_surrogates

logger = logging.getLogger(__name__)

LIMIT_REACHED = "The call was not made: the run has reached a limit."
RUN_STOPPED = "The call was not made: the run was stopped before."
NOT_APPROVED_YET = "The call has not been made: it waits for approval."
CANCELLED = "The call was cancelled. Whether it has had an effect is not known."
EARLIER_ATTEMPT = "Whether an earlier attempt at this call has had an effect is not known."
DECISION_TAKEN = "The decision is taken."
ANSWER_ACCEPTED = "The answer was accepted."
AFTER_ANSWER = "The call was not made: the run has ended with an answer."
AFTER_DECISION = "The call was not made: the decision was taken before."

WITHHELD = "The result was withheld: a guardrail has stopped the run."

MakeContext = Callable[..., ToolContext]

# Marks the end of the calls in the queue of events.
_DONE = RunEvent("")


class ToolCalls:
    """Runs the open calls of a run. Afterwards `pending` are the calls that wait for a person."""

    def __init__(
        self,
        journal: Journal,
        participant: Participant,
        stop_timer: StopTimer,
        *,
        budget: Budget,
        make_context: MakeContext,
        find_participant: FindParticipant,
        deps: Any = None,
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self.participant = participant
        """The active agent."""
        self._find_participant = find_participant
        self._stop_timer = stop_timer
        self._budget = budget
        self._make_context = make_context
        self._deps = deps
        self._events: asyncio.Queue[RunEvent] = asyncio.Queue()
        self.pending: list[PendingToolCall] = []
        self.abandoned: list[ToolInvocation] = []
        """The calls whose tools did not stop when they were cancelled."""

    async def run(self, *, has_next_turn: bool) -> AsyncGenerator[RunEvent, None]:
        """Run the open calls that can run now.

        Without a next turn the model cannot read results, so only calls that can end the run are made.
        """
        self.pending = []
        await self._read_outputs()
        decision = next((call for call in self._state.open_calls if call.name == self._task.decision), None)
        if decision is None and not has_next_turn:
            await self._close_open_calls(LIMIT_REACHED, is_spared=self._is_final)
        if self._state.open_calls:
            # Leaving this method must stop all calls: a later result would be written after the end of the run.
            async with contextlib.aclosing(self._run_open(decision)) as events:
                async for event in events:
                    yield event
        for event in self.drain_events():
            yield event

    async def _run_open(self, decision: ToolInvocation | None) -> AsyncGenerator[RunEvent, None]:
        """Run the open calls: up to a decision, and handoffs after all others."""
        if self.participant.guardrails.calls:
            await self._check_calls()
        open_calls = self._state.open_calls
        candidates = open_calls[: open_calls.index(decision)] if decision else list(open_calls)
        handoffs = [call for call in candidates if call.name in self.participant.handoffs]
        others = [call for call in candidates if call not in handoffs] if handoffs else candidates
        async with contextlib.aclosing(self._run_admitted(others)) as events:
            async for event in events:
                yield event
        if handoffs and not self.pending and not self._state.block_reason:
            async with contextlib.aclosing(self._run_handoff(*handoffs)) as events:
                async for event in events:
                    yield event
        if decision is not None and not self.pending:
            await self._write_result(decision, ToolResult(DECISION_TAKEN), consequence="decision")
            await self._close_open_calls(AFTER_DECISION)

    async def _read_outputs(self) -> None:
        """Validate the open calls of output tools. They have no effect, so they need neither an intent nor approval."""
        output = self._task.output
        if output is None or not output.tools:
            return
        for call in [each for each in self._state.open_calls if each.name in output.tools]:
            try:
                output.parse_call(call.name, call.arguments)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                refusal = make_error_result(f"The answer does not fit: {error}")
                await self._write_result(call, refusal, consequence="invalid_output")
            else:
                await self._write_result(call, ToolResult(ANSWER_ACCEPTED), consequence="output")

    def _is_final(self, call: ToolInvocation) -> bool:
        tool = self._executor.tools.get(call.name)
        return tool is not None and tool.final

    @property
    def _executor(self) -> Executor:
        return self.participant.executor

    @property
    def _task(self) -> Task:
        return self.participant.task

    async def begin(self, call: ToolInvocation, attempt: int) -> None:
        """Record an attempt at a call before it is made. Raise RunTaken if another process has taken over the run."""
        if attempt == 1:
            await self._journal.write(CallIntentEntry(call.call_id))
            self._events.put_nowait(ToolStarted(self._journal.run_id, call, self._journal.make_key(call)))
        elif self._journal.ownership is not None:
            await self._journal.ownership.check()

    async def _close_open_calls(
        self, reason: str, is_spared: Callable[[ToolInvocation], bool] = lambda _: False
    ) -> None:
        """Give every open call an error as its output, so that the conversation can be continued."""
        for call in [each for each in self._state.open_calls if not is_spared(each)]:
            is_started = call.call_id in self._state.started_calls
            refusal = make_error_result(INTERRUPTED if is_started else reason)
            await self._write_result(call, structs.replace(refusal, may_have_happened=is_started))

    def close_history(self) -> list[JsonObject]:
        """Return the history with an error as the output of each open call, so that another run can continue it."""
        state = self._state
        history = state.conversation
        waiting = NOT_APPROVED_YET if self.pending else RUN_STOPPED
        for call in state.open_calls:
            error = make_error_result(CANCELLED if call.call_id in state.started_calls else waiting)
            history += make_output_items(state.find_item(call), error.output)
        return history

    def drain_events(self) -> list[RunEvent]:
        """Return the events that were not emitted yet."""
        events = [self._events.get_nowait() for _ in range(self._events.qsize())]
        return [event for event in events if event is not _DONE]

    # Guardrails

    async def _check_calls(self) -> None:
        """Check the open calls that have not begun. A call that has begun was checked before."""
        state, guardrails = self._state, self.participant.guardrails
        for call in list(state.open_calls):
            if call.call_id in state.started_calls or call.call_id in state.replaced_calls:
                continue
            check = CallCheck(run_id=self._journal.run_id, agent=self.participant.name, deps=self._deps, call=call)
            try:
                checked = await self._stop_timer.wait(functools.partial(guardrails.check_call, check))
            except ModelRetry as retry:
                await self._write_result(call, make_error_result(str(retry)))
                continue
            if checked != call:
                await self._journal.write(ArgumentsReplacedEntry(call.call_id, checked.arguments))

    async def _check_result(self, call: ToolInvocation, result: ToolResult) -> tuple[ToolResult, str]:
        """Return the result for the model, and the reason to end the run if there is one."""
        run_id, agent = self._journal.run_id, self.participant.name
        check = ResultCheck(run_id=run_id, agent=agent, deps=self._deps, call=call, result=result)
        try:
            return await self.participant.guardrails.check_result(check), ""
        except ModelRetry as retry:
            replaced, reason = make_error_result(str(retry)), ""
        except Blocked as blocked:
            replaced, reason = make_error_result(WITHHELD), blocked.reason
        unchanged = {"spent": result.spent, "tool_calls": result.tool_calls}
        return structs.replace(replaced, **unchanged, may_have_happened=result.may_have_happened), reason

    # Admission

    async def _run_admitted(self, calls: list[ToolInvocation]) -> AsyncGenerator[RunEvent, None]:
        """Run the calls that can run now."""
        admitted: list[ToolInvocation] = []
        repeats: list[int] = []
        for call in calls:
            repeat = self._count_repeats(call, admitted)
            if await self._admit(call, repeat):
                admitted.append(call)
                repeats.append(repeat)
        async with contextlib.aclosing(self._run_all(admitted, repeats)) as events:
            async for event in events:
                yield event

    async def _run_handoff(self, call: ToolInvocation, *others: ToolInvocation) -> AsyncGenerator[RunEvent, None]:
        """Run a handoff, after all other calls of the turn, and refuse further ones. None runs after a final answer."""
        if self._state.final_call is not None:
            for each in (call, *others):
                await self._write_result(each, make_error_result(AFTER_ANSWER))
            return
        for other in others:
            await self._write_result(other, make_error_result(SECOND_HANDOFF))
        async with contextlib.aclosing(self._run_admitted([call])) as events:
            async for event in events:
                yield event

    async def _admit(self, call: ToolInvocation, repeat: int) -> bool:
        """Return True if the call runs now. Otherwise it is pending, or its error is written as the result."""
        tool = self._executor.tools.get(call.name)
        refusal, consequence = self._find_refusal(call, tool, repeat)
        if tool is None and refusal is None:
            self._check_tool_is_not_needed(call)
        if refusal is not None:
            refused = structs.replace(make_error_result(refusal), may_have_happened=self._may_have_happened(call))
            await self._write_result(call, refused, consequence=consequence)
            return False
        if call.call_id not in self._state.verdicts and self._must_ask(call, tool):
            reason: PendingReason = "may_have_happened" if self._may_have_happened(call) else "needs_approval"
            self.pending.append(self._journal.make_pending(call, reason))
            return False
        self._budget.reserve_call(call.call_id)
        return True

    def _check_tool_is_not_needed(self, call: ToolInvocation) -> None:
        """Raise MissingTool if a call without its tool is approved, or is a paused call of a subagent."""
        is_approved = call.call_id in self._state.verdicts
        if is_approved or call.call_id in self._state.paused_calls:
            raise MissingTool(
                f"The {'approved' if is_approved else 'paused'} call '{call.call_id}' needs the tool '{call.name}': "
                "resume the run with it in 'tools'.",
                param="tools",
            )

    def _find_refusal(self, call: ToolInvocation, tool: Tool | None, repeat: int) -> tuple[str | None, Consequence]:
        """Return the reason not to run a call, if there is one, and its consequence for the run."""
        state = self._state
        verdict = state.verdicts.get(call.call_id)
        interrupted = is_interrupted(state, call)
        if verdict is not None and not verdict.approved:
            return verdict.reason or (INTERRUPTED if self._may_have_happened(call) else DENIED), ""
        if interrupted:
            is_reported = tool is not None and tool.on_interrupt == "tell" and verdict is None
            return (INTERRUPTED if is_reported else None), ""
        if call.call_id not in state.started_calls and not self._budget.has_calls_left():
            return LIMIT_REACHED, "budget"
        if repeat >= STOP_AT:
            return STOPPED, "no_progress"
        return None, ""

    def _must_ask(self, call: ToolInvocation, tool: Tool | None) -> bool:
        if tool is None or call.call_id in self._state.paused_calls:
            return False
        if is_interrupted(self._state, call):
            # It was approved before, or needed no approval.
            return tool.on_interrupt == "ask"
        repeats_unknown = self._may_have_happened(call) and not tool.repeatable
        return (tool.on_interrupt == "ask" and repeats_unknown) or needs_approval(tool, call)

    def _may_have_happened(self, call: ToolInvocation) -> bool:
        """Return True if the call, or an unresolved one that it repeats, may have had its effect."""
        return is_interrupted(self._state, call) or self._state.find_inherited(call) is not None

    def _count_repeats(self, call: ToolInvocation, others: list[ToolInvocation]) -> int:
        """Return how often this call was made without progress, including this time.

        Calls of repeatable tools count once. Identical calls of one turn count, since none of them knows the result.
        """
        tool = self._executor.tools.get(call.name)
        if tool is not None and tool.repeatable:
            return 1
        signature = make_signature(call)
        return 1 + self._state.repeats.count(signature) + sum(make_signature(each) == signature for each in others)

    # Running them

    async def _run_all(self, calls: list[ToolInvocation], repeats: list[int]) -> AsyncGenerator[RunEvent, None]:
        if not calls:
            return
        running = [asyncio.ensure_future(self._run(*each)) for each in zip(calls, repeats, strict=True)]
        open_count = len(running)

        def end_call(task: asyncio.Task[None]) -> None:
            nonlocal open_count
            open_count -= 1
            # Without a tool, the run fails after the other calls: they may have effects.
            if not open_count or task.cancelled() or not isinstance(task.exception(), MissingTool | None):
                self._events.put_nowait(_DONE)

        for task in running:
            task.add_done_callback(end_call)
        try:
            while (event := await self._stop_timer.wait(self._events.get)) is not _DONE:
                yield event
            for task in running:
                if task.done():
                    task.result()
        finally:
            if open_count:
                await cancel_tasks(*running)

    async def _run(self, call: ToolInvocation, repeat: int) -> None:
        run_id = self._journal.run_id
        context = self._make_context(
            run_id=run_id,
            call_id=call.call_id,
            idempotency_key=self._journal.make_key(call),
            report=self._make_report(call),
            emit=self._events.put_nowait,
        )
        is_unknown = self._may_have_happened(call)
        # The tool may have had an effect, so the entry after it is written even if this task is cancelled meanwhile.
        try:
            result = await self._executor.execute(call, context, _Attempts(self, call))
        except ApprovalRequired as required:
            waiting = [
                PausedCall(each.call_id, each.name, each.arguments, each.reason, each.idempotency_key)
                for each in required.calls
            ]
            pause = CallPauseEntry(call.call_id, waiting, required.state, *self._budget.find_spent(call.call_id))
            await self._finish_write(self._journal.write(pause))
            self.pending += required.calls
            return
        except asyncio.CancelledError:
            subagent = self._journal.find_subagent(call)
            if subagent is not None and not self._journal.is_durable:
                # There is no ledger from which the subagent could be resumed.
                state = subagent.pack()
                spent = self._budget.find_spent(call.call_id)
                await self._journal.write(CallPauseEntry(call.call_id, [], state, *spent))
            raise
        if is_unknown and result.is_error and self._journal.find_subagent(call) is None:
            # This error says nothing about the earlier attempt.
            result = structs.replace(add_to_error(result, EARLIER_ATTEMPT), may_have_happened=True)
        if repeat >= WARN_AT and not self._is_final(call) and not self._state.repeats.is_new(call, result.output):
            self._events.put_nowait(Notice(run_id, f"{call.name} was called {repeat} times with the same arguments"))
            result = add_warning(result)
        block_reason = ""
        if self.participant.guardrails.results:
            result, block_reason = await self._check_result(call, result)
        handoff = None if result.is_error or block_reason else self.participant.handoffs.get(call.name)
        if handoff is not None:
            result = await self._hand_off(call, handoff, result)
            if not result.is_error:
                return
        consequence: Consequence = "final" if self._is_final(call) and not result.is_error else ""
        write = self._write_result(call, result, consequence=consequence, block_reason=block_reason)
        await self._finish_write(write)

    async def _hand_off(self, call: ToolInvocation, handoff: Handoff, result: ToolResult) -> ToolResult:
        """Pass the run to another agent. Return an error for the model if that fails."""
        state, before = self._state, self.participant
        history = list(state.history)
        history.insert(state.find_output_index(call), make_output_item(state.find_item(call), result.output))
        try:
            filtered = await handoff.filter_history(history)
        except Exception as error:
            logger.warning("the input_filter of the handoff %s failed", call.name, exc_info=error)
            return make_error_result(f"The handoff failed: {type(error).__name__}: {error}")
        after = self._find_participant(handoff.agent.name)
        cost = self._budget.unrecorded_cost
        entry = HandoffEntry(
            call.call_id,
            after.name,
            result.output,
            UNSET if filtered is None else filtered,
            before.endpoint != after.endpoint,
            UNSET if cost is None else cost,
        )
        await self._finish_write(self._journal.write(entry))
        self._events.put_nowait(ToolFinished(self._journal.run_id, call, result.output, result.is_error))
        return result

    async def _finish_write(self, write: Coroutine[Any, Any, None]) -> None:
        """Await a write to the journal that a cancellation must not interrupt."""
        if self._journal.is_durable:
            await defer_cancellation(asyncio.ensure_future(write))
        else:
            await write  # does not suspend

    def _make_report(self, call: ToolInvocation) -> Callable[[str], None]:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def report(message: str) -> None:
            progress = ToolProgress(self._journal.run_id, call.call_id, replace_surrogates(str(message)))
            if threading.get_ident() == thread:
                self._events.put_nowait(progress)
                return
            # The thread of a cancelled call may outlive the event loop.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._events.put_nowait, progress)

        return report

    async def _write_result(
        self, call: ToolInvocation, result: ToolResult, *, consequence: Consequence = "", block_reason: str = ""
    ) -> None:
        # The result of a subagent that was stopped, or not resumed, does not have its usage.
        spent, tool_calls = self._budget.find_spent(call.call_id) if result.spent is None else (UNSET, UNSET)
        entry = CallResultEntry(
            call.call_id,
            result.output,
            result.is_error,
            "blocked" if block_reason else consequence,
            result.spent or spent or None,
            result.tool_calls or tool_calls or UNSET,
            block_reason or UNSET,
            self._list_unresolved(call),
            self._find_unresolved_key(call, result),
        )
        await self._journal.write(entry)
        finished = ToolFinished(
            self._journal.run_id, call, result.output, result.is_error, may_have_happened=result.may_have_happened
        )
        self._events.put_nowait(finished)

    def _find_unresolved_key(self, call: ToolInvocation, result: ToolResult) -> str | UnsetType:
        """Return the key of a call whose effect is not known. A subagent lists its own unresolved calls instead."""
        is_known = not result.may_have_happened or self._journal.find_subagent(call) is not None
        return UNSET if is_known else self._journal.make_key(call)

    def _list_unresolved(self, call: ToolInvocation) -> list[UnresolvedCall] | UnsetType:
        """Return the unresolved calls of the subagent that a call has run. UNSET if there were none before either."""
        subagent = self._journal.find_subagent(call)
        if subagent is None:
            return UNSET
        had_some = call.name in self._state.unresolved_calls and self._state.is_first_of_tool(call)
        unresolved = list_unresolved(subagent, self._budget.find_subagent(call.call_id))
        return unresolved or ([] if had_some else UNSET)


class _Attempts(CallObserver):
    """The attempts at one call."""

    def __init__(self, calls: ToolCalls, call: ToolInvocation) -> None:
        self._calls = calls
        self._call = call
        self._count = 0

    async def begin(self) -> None:
        self._count += 1
        await self._calls.begin(self._call, self._count)

    def give_up(self) -> None:
        self._calls.abandoned.append(self._call)
