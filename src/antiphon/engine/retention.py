"""Forgetting what has been kept long enough."""

import asyncio
import logging
import time

from antiphon.store.base import Responses

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 3600.0


class Retention:
    """Deletes what has expired an hour ago: at the start, and then every hour. Until then it is only hidden.

    A response that has not ended yet is not in the store, and would find what it continues gone.
    """

    def __init__(self, store: Responses) -> None:
        self._store = store
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._sweep_regularly())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                forgotten = await self._store.expire(int(time.time() - SWEEP_SECONDS))
            except Exception:
                logger.exception("what has expired could not be deleted")
            else:
                if forgotten:
                    logger.info("deleted %d expired responses and conversations", forgotten)
            await asyncio.sleep(SWEEP_SECONDS)
