"""The calls of a turn: which of them may be made, making them side by side, and writing down each before and after."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec

from antiphon.agent.guard import STOPPED, STOPPED_AT, WARNED_AT, WARNING, count_repeats
from antiphon.agent.journal import Intended, Journal, Resulted
from antiphon.agent.outcome import Notice, RunEvent, ToolFinished, ToolProgress, ToolStarted
from antiphon.agent.stopping import Stopwatch
from antiphon.agent.task import Task
from antiphon.tools.base import Call, Tool, ToolResult
from antiphon.tools.execute import Executor, fail

NOT_RUN = "The call was not made: the run has reached a limit."
TAKEN = "The decision is taken."
DENIED = "The call was not approved."
CANCELLED = "The call was cancelled. Whether it has had an effect is not known."
INTERRUPTED = "The process was interrupted during this call. Whether it has had an effect is not known."


class Calls:
    """Makes the open calls of a run.

    Afterwards `pending` are those that wait for approval. `decided` is the call that was the run's decision, if there
    was one, and `decision` its arguments. `stuck` says that the model repeats itself, `exhausted` that it may call no
    more.
    """

    def __init__(
        self,
        journal: Journal,
        executor: Executor,
        task: Task,
        stopwatch: Stopwatch,
        *,
        make_context: Callable[..., Any],
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self._executor = executor
        self._task = task
        self._stopwatch = stopwatch
        self._make_context = make_context
        self._begun: set[str] = set()
        self._happened: asyncio.Queue[RunEvent] = asyncio.Queue()
        self._writing = asyncio.Lock()
        self.pending: list[Call] = []
        self.decided: Call | None = None
        self.decision: Mapping[str, Any] | None = None
        self.stuck = False
        self.exhausted = False

    async def make(self, *, has_room: bool) -> AsyncGenerator[RunEvent, None]:
        """Make those that can be made now, and tell how it goes. Without room nobody would read what they come to."""
        self.pending = []
        deciding = next((call for call in self._state.open if call.name == self._task.decision), None)
        if deciding is None and not has_room:
            await self.settle_cancelled()
            return
        candidates = self._state.open[: self._state.open.index(deciding)] if deciding else list(self._state.open)
        runnable = [call for call in candidates if await self._may_run(call)]
        async for event in self._run_all(runnable):
            yield event
        if deciding is not None and not self.pending:
            self.decided, self.decision = deciding, _read_arguments(deciding)
            await self._settle(deciding, ToolResult(TAKEN))
            await self.settle_cancelled()

    async def settle_cancelled(self) -> None:
        """Give every open call an output, so that the conversation can be continued."""
        for call in list(self._state.open):
            begun = call.call_id in self._state.intended
            await self._settle(call, fail(CANCELLED if begun else NOT_RUN))

    async def _may_run(self, call: Call) -> bool:
        """Whether to make this call now. If not, it waits for approval, or has its result already."""
        tool = self._executor.tools.get(call.name)
        verdict = self._state.judged.get(call.call_id)
        if verdict is not None and not verdict.approved:
            await self._settle(call, fail(verdict.reason or DENIED))
            return False
        refusal = self._find_refusal(call, tool)
        if refusal is not None:
            await self._settle(call, refusal)
            return False
        if verdict is None and self._must_ask(call, tool):
            self.pending.append(call)
            return False
        return True

    def _find_refusal(self, call: Call, tool: Tool | None) -> ToolResult | None:
        limit = self._task.limits.tool_calls
        running = len(self._begun - {each.call_id for each in self._state.made})
        if limit is not None and self._state.tool_calls + running >= limit:
            self.exhausted = True
            return fail(NOT_RUN)
        if not self._is_repeatable(tool) and count_repeats(call, self._state.made) >= STOPPED_AT:
            self.stuck = True
            return fail(STOPPED)
        if self._is_interrupted(call) and tool is not None and tool.on_interrupt == "tell":
            return fail(INTERRUPTED)
        self._begun.add(call.call_id)
        return None

    def _must_ask(self, call: Call, tool: Tool | None) -> bool:
        if tool is None:
            return False
        if self._is_interrupted(call) and tool.on_interrupt == "ask":
            return True
        if callable(tool.needs_approval):
            return tool.needs_approval(_read_arguments(call) or {})
        return tool.needs_approval

    def _is_interrupted(self, call: Call) -> bool:
        """An earlier process was about to make this call, and has not written down what it came to."""
        return call.call_id in self._state.intended

    @staticmethod
    def _is_repeatable(tool: Tool | None) -> bool:
        return tool is not None and tool.repeatable

    async def _run_all(self, calls: list[Call]) -> AsyncGenerator[RunEvent, None]:
        if not calls:
            return
        running = [asyncio.ensure_future(self._run(call)) for call in calls]
        everything = asyncio.gather(*running)
        everything.add_done_callback(lambda _: self._happened.put_nowait(_DONE))
        try:
            while (event := await self._stopwatch.wait(self._happened.get())) is not _DONE:
                yield event
            await everything
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, call: Call) -> None:
        run_id = self._journal.run_id
        if not self._is_interrupted(call):
            async with self._writing:
                await self._journal.write(Intended(call.call_id))
        self._happened.put_nowait(ToolStarted(run_id, call))
        position = self._state.calls.index(call)
        context = self._make_context(
            run_id=run_id,
            call_id=call.call_id,
            # The same for every attempt at this call, and for no other: a model may use an id of a call twice.
            idempotency_key=f"{run_id}:{self._state.turns}:{position}",
            report=lambda message: self._happened.put_nowait(ToolProgress(run_id, call.call_id, message)),
        )
        result = await self._executor.execute(call, context)
        await self._settle(call, self._warn(call, result))

    def _warn(self, call: Call, result: ToolResult) -> ToolResult:
        repeated = count_repeats(call, self._state.made)
        if repeated < WARNED_AT or self._is_repeatable(self._executor.tools.get(call.name)):
            return result
        self._happened.put_nowait(Notice(self._journal.run_id, f"{call.name} was called {repeated} times alike"))
        if isinstance(result.output, str):
            return ToolResult(f"{result.output}\n\n{WARNING}", result.is_error)
        return ToolResult([*result.output, {"type": "input_text", "text": WARNING}], result.is_error)

    async def _settle(self, call: Call, result: ToolResult) -> None:
        async with self._writing:
            await self._journal.write(Resulted(call.call_id, result.output, result.is_error))
        self._happened.put_nowait(ToolFinished(self._journal.run_id, call, result.output, result.is_error))


_DONE = RunEvent("")


def _read_arguments(call: Call) -> Mapping[str, Any] | None:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        return None
    return arguments if isinstance(arguments, dict) else None
