"""What a run may still use up, while others are at work for it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from antiphon.agent.journal import State
from antiphon.agent.limits import Prices
from antiphon.agent.task import Task


class Budget:
    """What a run has used up: in its own turns, and by the runs that work for it, as soon as they do.

    `share` is what the run that this one works for has lent it: it may use up no more than is left there.
    """

    def __init__(self, state: State, task: Task, *, share: "Share | None" = None) -> None:
        self._state = state
        self._limits = task.limits
        self._prices = task.prices
        self._above = share.budget if share is not None else None
        self._below: dict[tuple[int, str], Budget] = {}
        if share is not None:
            share.budget._lend(share.call_id, self)

    @property
    def cost(self) -> float | None:
        """What has been written down of it, at the prices of this run. None if it has none."""
        return None if self._prices is None else self._price(self._prices)

    def is_used_up(self) -> bool:
        tokens, cost = self._limits.tokens, self._limits.cost
        if tokens is not None and self._count() >= tokens:
            return True
        return cost is not None and self._prices is not None and self._charge(self._prices) >= cost

    def is_used_up_above(self) -> bool:
        """Whether a run that this one works for has nothing left."""
        return self._above is not None and (self._above.is_used_up() or self._above.is_used_up_above())

    def _lend(self, call_id: str, budget: "Budget") -> None:
        self._below = {key: each for key, each in self._below.items() if self._is_open(*key)}
        self._below[self._state.turns, call_id] = budget

    def _at_work(self) -> list["Budget"]:
        """Those whose spending has not been written down here yet."""
        return [each for key, each in self._below.items() if self._is_open(*key)]

    def _is_open(self, turn: int, call_id: str) -> bool:
        # A model may use the id of a call again in a later turn.
        return turn == self._state.turns and any(call.call_id == call_id for call in self._state.open)

    def _count(self) -> int:
        return self._state.usage.total_tokens + sum(each._count() for each in self._at_work())

    def _charge(self, prices: Prices) -> float:
        """What it has cost so far. Whoever has no prices of its own pays those of its asker."""
        return self._price(prices) + sum(each._charge(each._prices or prices) for each in self._at_work())

    def _price(self, prices: Prices) -> float:
        return prices.of(self._state.unpriced) + self._state.charged


class Share:
    """A budget for the run of one call."""

    def __init__(self, budget: Budget, call_id: str) -> None:
        self.budget = budget
        self.call_id = call_id


T = TypeVar("T")
Reason = Literal["deadline", "cancelled"]


class Stop(Exception):
    """The run has to stop now."""

    def __init__(self, kind: Reason) -> None:
        super().__init__(kind)
        self.kind: Reason = kind


class Stopwatch:
    """Knows when to stop, and interrupts what is waited for. `deadline` is a time of `clock`.

    One timer and one watcher serve a whole run: waiting costs next to nothing, since every event of a stream is waited
    for.
    """

    def __init__(self, deadline: float | None, cancel: asyncio.Event | None, clock: Callable[[], float]) -> None:
        self._deadline = deadline
        self._cancel = cancel
        self._clock = clock
        self._waiting: asyncio.Task[object] | None = None
        self._interrupted: Reason | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    def check(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise Stop("cancelled")
        if self._deadline is not None and self._clock() >= self._deadline:
            raise Stop("deadline")

    async def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """What the work comes to. If it is time to stop before that, the work is cancelled."""
        if self._deadline is None and self._cancel is None:
            return await work()
        self.check()
        self._arm()
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        asked_before = task.cancelling()
        self._waiting = task
        try:
            result = await work()
        except asyncio.CancelledError:
            if self._interrupted is None or task.uncancel() > asked_before:
                raise
            raise Stop(self._interrupted) from None
        finally:
            self._waiting = None
        if self._interrupted is not None:
            # The work was done in spite of it.
            task.uncancel()
            raise Stop(self._interrupted)
        return result

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        if self._deadline is not None and self._timer is None:
            self._timer = loop.call_later(max(0.0, self._deadline - self._clock()), self._interrupt, "deadline")
        if self._cancel is not None and self._watcher is None:
            self._watcher = loop.create_task(self._watch(self._cancel))

    async def _watch(self, cancel: asyncio.Event) -> None:
        await cancel.wait()
        self._interrupt("cancelled")

    def _interrupt(self, kind: Reason) -> None:
        if self._waiting is not None and self._interrupted is None:
            self._interrupted = kind
            self._waiting.cancel()
