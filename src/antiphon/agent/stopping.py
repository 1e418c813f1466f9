"""Reasons to stop that come from outside: the time is up, or somebody said so."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

T = TypeVar("T")


class Stop(Exception):
    """The run has to stop now."""

    def __init__(self, kind: Literal["deadline", "cancelled"]) -> None:
        super().__init__(kind)
        self.kind: Literal["deadline", "cancelled"] = kind


class Stopwatch:
    """Knows when to stop. `deadline` is a time of `clock`."""

    def __init__(self, deadline: float | None, cancel: asyncio.Event | None, clock: Callable[[], float]) -> None:
        self._deadline = deadline
        self._cancel = cancel
        self._clock = clock

    def check(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise Stop("cancelled")
        if self._deadline is not None and self._clock() >= self._deadline:
            raise Stop("deadline")

    async def wait(self, work: Awaitable[T]) -> T:
        """What the work comes to. If it is time to stop before that, the work is cancelled."""
        if self._deadline is None and self._cancel is None:
            return await work
        working = asyncio.ensure_future(work)
        cancelling = None if self._cancel is None else asyncio.ensure_future(self._cancel.wait())
        waiting = [each for each in (working, cancelling) if each is not None]
        left = None if self._deadline is None else max(0.0, self._deadline - self._clock())
        try:
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Stop("cancelled" if self._cancel is not None and self._cancel.is_set() else "deadline")
        finally:
            if cancelling is not None:
                cancelling.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))
