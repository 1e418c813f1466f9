"""A queue of turns that tests can wait for."""

import asyncio
from typing import Any

from antiphon.turn_queue import Slot, TurnQueue


class WatchedQueue(TurnQueue):
    """A queue that counts arrivals, refused ones too."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._arrivals = asyncio.Semaphore(0)

    async def acquire(self, project: str, **options: Any) -> Slot:
        # A test that waits for the arrival runs after the turn has a slot, waits or is refused.
        self._arrivals.release()
        return await super().acquire(project, **options)

    async def until_arrivals(self, count: int) -> None:
        """Wait until so many more turns have arrived."""
        for _ in range(count):
            await self._arrivals.acquire()
