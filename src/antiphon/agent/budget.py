"""Checks of a run's budget: tokens and cost, including subagents, and the deadline."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, NoReturn, TypeVar

from msgspec import UNSET, UnsetType

from antiphon.agent.entries import CallPauseEntry, UnresolvedCall
from antiphon.agent.journal import Journal
from antiphon.agent.limits import Prices
from antiphon.agent.run_state import RunState
from antiphon.agent.task import Task
from antiphon.protocol.response import Usage
from antiphon.tools.base import UsageCost
from antiphon.tools.executor import STOP_SECONDS

T = TypeVar("T")
StopReason = Literal["deadline", "cancelled"]
Interruption = StopReason | Literal["failed"]
"""`failed`: a task that the run depends on has failed."""

_NOTHING = UsageCost(Usage(0, 0, 0), 0.0)


class Budget:
    """The tokens and the cost that a run has used, and its limits for them.

    The usage of subagents counts while they run, before it is in the journal of this run. `parent` is set for the run
    of a subagent: it may use no more than the parent's budget has left. If the call repeats an earlier one, its run
    goes on, and the usage before that was counted with the earlier call.
    """

    def __init__(self, state: RunState, task: Task, *, parent: "ParentRun | None" = None) -> None:
        self._state = state
        self._limits = task.limits
        self._prices = task.prices
        self._parent = parent.budget if parent is not None else None
        self._children: dict[tuple[int, str], Budget] = {}
        self._reserved_turn = 0
        self._reserved: set[str] = set()
        """The admitted tool calls of that turn. The state does not count calls that have not begun."""
        repeated = None if parent is None else parent.repeated
        self._counted = (repeated.spent if repeated is not None else UNSET) or _NOTHING
        self._counted_calls = (repeated.tool_calls if repeated is not None else UNSET) or 0
        if parent is not None:
            parent.budget._add_child(parent.call_id, self)

    def change_prices(self, prices: Prices | None) -> None:
        """Set the prices of the agent that continues the run."""
        self._prices = prices

    @property
    def unrecorded_cost(self) -> float | None:
        """The cost of the usage whose cost is not in the journal. None without prices."""
        return None if self._prices is None else self._prices.compute_cost(self._state.unpriced_usage)

    @property
    def cost(self) -> float | None:
        """The cost so far, at the prices of this run and including subagents. None without prices."""
        return None if self._prices is None else self._sum_cost(self._prices)

    @property
    def currency(self) -> str | None:
        """The currency of the cost. None without prices."""
        return None if self._prices is None else self._prices.currency

    @property
    def usage(self) -> Usage:
        """The usage so far, including subagents that have not finished."""
        unfinished = [child.usage - child._counted.usage for child in self._list_running()]
        unfinished += [paused.spent.usage for paused in self._list_paused() if paused.spent]
        return sum(unfinished, self._state.usage)

    @property
    def tool_calls(self) -> int:
        """The number of tool calls so far, including those of subagents."""
        unfinished = [child.tool_calls - child._counted_calls for child in self._list_running()]
        unfinished += [paused.tool_calls or 0 for paused in self._list_paused()]
        return sum(unfinished, self._state.tool_calls)

    def find_subagent(self, call_id: str) -> "Budget | None":
        """Return the budget of the subagent that an open call has started in this process."""
        return self._children.get((self._state.turns, call_id))

    def find_spent(self, call_id: str) -> tuple[UsageCost | UnsetType, int | UnsetType]:
        """Return the usage and the tool calls of the subagent of an open call that count for this run."""
        child, paused = self.find_subagent(call_id), self._state.paused_calls.get(call_id)
        if child is not None:
            spent = UsageCost(child.usage, child.cost) - child._counted
            return spent, child.tool_calls - child._counted_calls
        return (UNSET, UNSET) if paused is None else (paused.spent, paused.tool_calls)

    def is_used_up(self) -> bool:
        """Return True if the limit of tokens or of cost is reached."""
        tokens, cost = self._limits.tokens, self._limits.cost
        if tokens is not None and self.usage.total_tokens >= tokens:
            return True
        return cost is not None and self._prices is not None and self._sum_cost(self._prices) >= cost

    def has_calls_left(self) -> bool:
        """Return True if another tool call is within the limits of this run and of its parents."""
        limit = self._limits.tool_calls
        if limit is not None and self.tool_calls + self._count_waiting() >= limit:
            return False
        return self._parent is None or self._parent.has_calls_left()

    def reserve_call(self, call_id: str) -> None:
        """Count a tool call from now on, before it begins: runs at the same time share their limits."""
        if self._reserved_turn != self._state.turns:
            self._reserved_turn, self._reserved = self._state.turns, set()
        self._reserved.add(call_id)

    def _count_waiting(self) -> int:
        """Return the number of reserved calls that have not begun, including those of subagents."""
        is_current = self._reserved_turn == self._state.turns
        own = len(self._reserved - self._state.started_calls) if is_current else 0
        return own + sum(child._count_waiting() for child in self._list_running())

    def is_parent_used_up(self) -> bool:
        """Return True if the budget of a parent run is used up."""
        return self._parent is not None and (self._parent.is_used_up() or self._parent.is_parent_used_up())

    def _add_child(self, call_id: str, budget: "Budget") -> None:
        self._children = {key: child for key, child in self._children.items() if self._is_open(*key)}
        self._children[self._state.turns, call_id] = budget

    def _list_running(self) -> list["Budget"]:
        """Return the budgets of the subagents whose usage is not in the journal yet."""
        return [child for key, child in self._children.items() if self._is_open(*key)]

    def _list_paused(self) -> list[CallPauseEntry]:
        """Return the pauses of the calls whose subagents have not been resumed by this process."""
        paused = self._state.paused_calls
        return [entry for call_id, entry in paused.items() if (self._state.turns, call_id) not in self._children]

    def _is_open(self, turn: int, call_id: str) -> bool:
        # A model may reuse the id of a call in a later turn.
        return turn == self._state.turns and any(call.call_id == call_id for call in self._state.open_calls)

    def _sum_cost(self, prices: Prices) -> float:
        """Return the cost so far. The prices of a parent apply to subagents that have none."""
        unfinished = [child._sum_new_cost(child._prices or prices) for child in self._list_running()]
        spent = [paused.spent for paused in self._list_paused() if paused.spent]
        unfinished += [prices.compute_cost(each.usage) if each.cost is None else each.cost for each in spent]
        return prices.compute_cost(self._state.unpriced_usage) + self._state.known_cost + sum(unfinished)

    def _sum_new_cost(self, prices: Prices) -> float:
        """Return the cost so far that was not counted with an earlier call."""
        counted = self._counted
        return self._sum_cost(prices) - (prices.compute_cost(counted.usage) if counted.cost is None else counted.cost)


class ParentRun:
    """The run whose call has started a subagent."""

    def __init__(
        self,
        journal: Journal,
        budget: Budget,
        call_id: str,
        unresolved: Sequence[UnresolvedCall] = (),
        *,
        repeated: UnresolvedCall | None = None,
    ) -> None:
        self.journal = journal
        self.budget = budget
        self.call_id = call_id
        self.unresolved = unresolved
        """The unresolved calls of earlier runs of the subagent, which a new run inherits."""
        self.repeated = repeated
        """The earlier call whose run this call continues."""


class Stop(Exception):
    """The run must stop now."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason: StopReason = reason


class StopTimer:
    """Interrupts a run at its deadline, or when it is cancelled. `deadline` is a time of `clock`.

    One timer and one watcher serve the whole run, because every event of a stream is awaited through `wait`. If a task
    that the run depends on fails, `wait` raises its exception.
    """

    def __init__(self, deadline: float | None, cancel: asyncio.Event | None, clock: Callable[[], float]) -> None:
        self._deadline = deadline
        self._cancel = cancel
        self._clock = clock
        self._waiting: asyncio.Task[object] | None = None
        self._interrupted: Interruption | None = None
        self._dependency: asyncio.Task[None] | None = None
        self._is_due = False
        """True if the timer has fired while nothing was awaited. It does not fire again."""
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise Stop if the run must stop. Raises the exception of the work that it depends on, if that has failed."""
        dependency = self._dependency
        if dependency is not None and dependency.done() and not dependency.cancelled():
            dependency.result()
        if self._cancel is not None and self._cancel.is_set():
            raise Stop("cancelled")
        if self._is_due or (self._deadline is not None and self._clock() >= self._deadline):
            raise Stop("deadline")

    @property
    def is_unused(self) -> bool:
        """True if nothing can interrupt the run, so that `wait` only returns the result of the work."""
        return self._deadline is None and self._cancel is None and self._dependency is None

    async def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the work. If the run must stop before that, cancel the work and raise Stop."""
        if self.is_unused:
            return await work()
        self.check()
        self._start()
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        cancelling_before = task.cancelling()
        self._waiting = task
        try:
            result = await work()
        except asyncio.CancelledError:
            if self._interrupted is None or task.uncancel() > cancelling_before:
                raise
            self._raise(self._interrupted)
        finally:
            self._waiting = None
        if self._interrupted is not None:
            # The work has finished in spite of the interruption.
            task.uncancel()
            self._raise(self._interrupted)
        return result

    def depend_on(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work at the same time as the run, until `settle`. If it fails, its exception interrupts the run."""
        self._dependency = asyncio.ensure_future(work)
        self._dependency.add_done_callback(self._report_failure)

    async def settle(self) -> None:
        """Wait until the run depends on no other work. Raises the exception of that work."""
        if self._dependency is not None:
            dependency = self._dependency
            await self.wait(lambda: asyncio.shield(dependency))
            self._dependency = None

    async def end_dependency(self) -> None:
        """Cancel the work that the run depends on, and wait for its end, but not longer than for a tool."""
        if self._dependency is not None:
            self._dependency.cancel()
            await asyncio.wait([self._dependency], timeout=STOP_SECONDS)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._deadline is not None and self._timer is None:
            self._timer = loop.call_later(max(0.0, self._deadline - self._clock()), self._interrupt, "deadline")
        if self._cancel is not None and self._watcher is None:
            self._watcher = loop.create_task(self._watch(self._cancel))

    async def _watch(self, cancel: asyncio.Event) -> None:
        await cancel.wait()
        self._interrupt("cancelled")

    def _report_failure(self, dependency: "asyncio.Task[None]") -> None:
        if not dependency.cancelled() and dependency.exception() is not None:
            self._interrupt("failed")

    def _raise(self, reason: Interruption) -> NoReturn:
        if reason != "failed":
            raise Stop(reason) from None
        assert self._dependency is not None, "the work that has failed"
        error = self._dependency.exception()
        assert error is not None, "the work has failed"
        raise error from None

    def _interrupt(self, reason: Interruption) -> None:
        self._is_due |= reason == "deadline"
        if self._waiting is not None and self._interrupted is None:
            self._interrupted = reason
            self._waiting.cancel()
