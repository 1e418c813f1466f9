"""The calls of a turn: which of them may be made, making them side by side, and writing down each before and after."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from antiphon.agent.budget import Stopwatch
from antiphon.agent.entries import Intended, Meaning, Paused, Resulted
from antiphon.agent.journal import STOPPED, STOPPED_AT, WARNED_AT, WARNING, Journal, sign
from antiphon.agent.outcome import Notice, RunEvent, ToolFinished, ToolProgress, ToolStarted
from antiphon.agent.task import Task
from antiphon.protocol.json_text import read_json
from antiphon.tools.base import ApprovalRequired, Tool, ToolContext, ToolInvocation, ToolResult
from antiphon.tools.executor import Executor, make_error_result, replace_surrogates

logger = logging.getLogger(__name__)

NO_ROOM = "The call was not made: the run has reached a limit."
NOT_MADE = "The call was not made: the run was stopped before."
TAKEN = "The decision is taken."
DENIED = "The call was not approved."
CANCELLED = "The call was cancelled. Whether it has had an effect is not known."
INTERRUPTED = "The process was interrupted during this call. Whether it has had an effect is not known."

MakeContext = Callable[..., ToolContext]


class Calls:
    """Makes the open calls of a run. Afterwards `pending` are those that wait for approval."""

    def __init__(
        self, journal: Journal, executor: Executor, task: Task, stopwatch: Stopwatch, *, make_context: MakeContext
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self._executor = executor
        self._task = task
        self._stopwatch = stopwatch
        self._make_context = make_context
        self._happened: asyncio.Queue[RunEvent] = asyncio.Queue()
        self.pending: list[ToolInvocation] = []

    async def make(self, *, has_room: bool) -> AsyncGenerator[RunEvent, None]:
        """Make those that can be made now, and tell how it goes. Without room nobody would read what they come to."""
        self.pending = []
        deciding = next((call for call in self._state.open if call.name == self._task.decision), None)
        if deciding is None and not has_room:
            await self.settle_rest(NO_ROOM)
        else:
            candidates = self._state.open[: self._state.open.index(deciding)] if deciding else list(self._state.open)
            admitted: list[ToolInvocation] = []
            repeats: list[int] = []
            for call in candidates:
                repeated = self._count_repeats(call, admitted)
                if await self._admit(call, admitted, repeated):
                    admitted.append(call)
                    repeats.append(repeated)
            # Whoever leaves here must leave no call running: what it came to would be written after the end.
            async with aclosing(self._run_all(admitted, repeats)) as happening:
                async for event in happening:
                    yield event
            if deciding is not None and not self.pending:
                await self._settle(deciding, ToolResult(TAKEN), means="decision")
                await self.settle_rest("The call was not made: the decision was taken before.")
        for event in self.drain():
            yield event

    async def settle_rest(self, reason: str = NOT_MADE) -> None:
        """Give every open call an output, so that the conversation can be continued."""
        for call in list(self._state.open):
            begun = call.call_id in self._state.intended
            await self._settle(call, make_error_result(CANCELLED if begun else reason))

    def drain(self) -> list[RunEvent]:
        """What has happened and was not told yet."""
        told = [self._happened.get_nowait() for _ in range(self._happened.qsize())]
        return [event for event in told if event is not _DONE]

    # Whether to make a call

    async def _admit(self, call: ToolInvocation, admitted: list[ToolInvocation], repeated: int) -> bool:
        """Whether to make this call now. If not, it waits for approval, or has its result already."""
        tool = self._executor.tools.get(call.name)
        refusal, means = self._find_refusal(call, tool, admitted, repeated)
        if refusal is not None:
            await self._settle(call, make_error_result(refusal), means=means)
            return False
        if call.call_id not in self._state.judged and self._must_ask(call, tool):
            self.pending.append(call)
            return False
        return True

    def _find_refusal(
        self, call: ToolInvocation, tool: Tool | None, admitted: list[ToolInvocation], repeated: int
    ) -> tuple[str | None, Meaning]:
        """Why a call is not made, if it is not, and what that means for the run."""
        state, limit = self._state, self._task.limits.tool_calls
        verdict = state.judged.get(call.call_id)
        interrupted = self._is_interrupted(call)
        if verdict is not None and not verdict.approved:
            return verdict.reason or (INTERRUPTED if interrupted else DENIED), ""
        if interrupted:
            told = tool is not None and tool.on_interrupt == "tell" and verdict is None
            return (INTERRUPTED if told else None), ""
        waiting = sum(each.call_id not in state.intended for each in admitted)
        if limit is not None and call.call_id not in state.intended and state.tool_calls + waiting >= limit:
            return NO_ROOM, "budget"
        if repeated >= STOPPED_AT:
            return STOPPED, "no_progress"
        return None, ""

    def _must_ask(self, call: ToolInvocation, tool: Tool | None) -> bool:
        if tool is None or call.call_id in self._state.paused:
            return False
        if self._is_interrupted(call):
            # It had been allowed before.
            return tool.on_interrupt == "ask"
        if not callable(tool.needs_approval):
            return tool.needs_approval
        arguments = read_arguments(call)
        if arguments is None:
            # The tool will refuse them.
            return False
        try:
            return bool(tool.needs_approval(arguments))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:
            logger.exception("whether the tool %s needs approval cannot be told, so it does", tool.name)
            return True

    def _is_interrupted(self, call: ToolInvocation) -> bool:
        """An earlier process was about to make this call, and has not written down what it came to."""
        return call.call_id in self._state.intended and call.call_id not in self._state.paused

    def _count_repeats(self, call: ToolInvocation, others: list[ToolInvocation]) -> int:
        """How often this call has been made, this time included, as far as that matters."""
        tool = self._executor.tools.get(call.name)
        if tool is not None and tool.repeatable:
            return 1
        signature = sign(call)
        return 1 + self._state.made[signature] + sum(sign(each) == signature for each in others)

    # Making them

    async def _run_all(self, calls: list[ToolInvocation], repeats: list[int]) -> AsyncGenerator[RunEvent, None]:
        if not calls:
            return
        running = [
            asyncio.ensure_future(self._run(call, repeated)) for call, repeated in zip(calls, repeats, strict=True)
        ]
        everything = asyncio.gather(*running)
        everything.add_done_callback(lambda _: self._happened.put_nowait(_DONE))
        try:
            while (event := await self._stopwatch.wait(self._happened.get)) is not _DONE:
                yield event
            await everything
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(everything, *running, return_exceptions=True)

    async def _run(self, call: ToolInvocation, repeated: int) -> None:
        run_id = self._journal.run_id
        context = self._make_context(
            run_id=run_id,
            call_id=call.call_id,
            # The same for every attempt at this call, and for no other: a model may use an id of a call twice.
            idempotency_key=f"{run_id}:{self._state.turns}:{self._state.calls.index(call)}",
            report=self._make_report(call),
        )
        await self._journal.write(Intended(call.call_id))
        self._happened.put_nowait(ToolStarted(run_id, call))
        try:
            result = await self._executor.execute(call, context)
        except ApprovalRequired as waiting:
            await _see_through(self._journal.write(Paused(call.call_id, list(waiting.calls), waiting.state)))
            self.pending += waiting.calls
            return
        if repeated >= WARNED_AT:
            self._happened.put_nowait(Notice(run_id, f"{call.name} was called {repeated} times alike"))
            result = _warn(result)
        await _see_through(self._settle(call, result))

    def _make_report(self, call: ToolInvocation) -> Callable[[str], None]:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def report(message: str) -> None:
            progress = ToolProgress(self._journal.run_id, call.call_id, replace_surrogates(str(message)))
            if threading.get_ident() == thread:
                self._happened.put_nowait(progress)
                return
            # A thread that nobody waits for any more may outlive the loop.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._happened.put_nowait, progress)

        return report

    async def _settle(self, call: ToolInvocation, result: ToolResult, *, means: Meaning = "") -> None:
        await self._journal.write(Resulted(call.call_id, result.output, result.is_error, means, result.spent))
        self._happened.put_nowait(ToolFinished(self._journal.run_id, call, result.output, result.is_error))


_DONE = RunEvent("")


async def _see_through(work: Coroutine[Any, Any, None]) -> None:
    """Do this to the end, even if somebody cancels us meanwhile: what a tool has done must not be forgotten."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise


def _warn(result: ToolResult) -> ToolResult:
    if isinstance(result.output, str):
        return msgspec.structs.replace(result, output=f"{result.output}\n\n{WARNING}")
    return msgspec.structs.replace(result, output=[*result.output, {"type": "input_text", "text": WARNING}])


def read_arguments(call: ToolInvocation) -> Mapping[str, Any] | None:
    """The arguments, if they are a JSON object."""
    try:
        arguments = read_json(call.arguments or "{}")
    except msgspec.DecodeError:
        return None
    return arguments if isinstance(arguments, dict) else None
