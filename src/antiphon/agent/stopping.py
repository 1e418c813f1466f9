"""Reasons to stop that come from outside: the time is up, or somebody said so."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

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
