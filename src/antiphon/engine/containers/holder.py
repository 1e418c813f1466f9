"""The right of one process to run code in a container."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from antiphon.errors import AntiphonError, NotFound, Unavailable
from antiphon.store.containers import ContainerStore

logger = logging.getLogger(__name__)

# Time after which another process runs code in the container of a dead one.
_LEASE_SECONDS = 15.0
_RENEWAL_SECONDS = _LEASE_SECONDS / 3
_POLL_SECONDS = 0.2
# A process whose lease has been over for this time has ended. A slow one would have renewed it.
_DEAD_SECONDS = 60.0


class ContainerHolder:
    """Lets one call at a time run code in a container, over all processes that use the store.

    A call waits for the code of another process for `wait_seconds` and one lease.
    """

    def __init__(self, store: ContainerStore, *, wait_seconds: float) -> None:
        self._store = store
        self._wait_seconds = wait_seconds
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def hold(self, project: str, container_id: str) -> AsyncIterator[str]:
        """Wait until no other call runs code in a container. Yield the owner under which this one does.

        The container does not expire meanwhile. Raises NotFound if it is deleted, and Unavailable after the waiting
        time.
        """
        owner = secrets.token_hex(16)
        lock = self._locks.setdefault(container_id, asyncio.Lock())
        async with lock:
            await self._wait(project, container_id, owner)
            async with self.use(project, container_id, owner):
                yield owner

    @asynccontextmanager
    async def use(self, project: str, container_id: str, owner: str | None = None) -> AsyncIterator[None]:
        """Count the time in this block as activity of the container, and renew the lease of its owner."""
        renewal = asyncio.create_task(self._renew(project, container_id, owner))
        try:
            yield
        finally:
            renewal.cancel()

    async def take_over(self, *, limit: int) -> AsyncIterator[tuple[str, str, str]]:
        """Yield the project, id and new owner of containers whose process ended while it ran code in them."""
        for project, container_id in await self._store.list_interrupted_runs(seconds=_DEAD_SECONDS, limit=limit):
            lock = self._locks.get(container_id)
            if lock is not None and lock.locked():  # this process could not renew its lease
                continue
            owner = secrets.token_hex(16)
            if await self._store.hold_container(project, container_id, owner, lease=_LEASE_SECONDS):
                yield project, container_id, owner

    async def _wait(self, project: str, container_id: str, owner: str) -> None:
        deadline = time.monotonic() + self._wait_seconds + _LEASE_SECONDS
        while not await self._store.hold_container(project, container_id, owner, lease=_LEASE_SECONDS):
            if await self._store.load_container(project, container_id) is None:
                raise container_not_found(container_id)
            if time.monotonic() > deadline:
                raise Unavailable("Another server runs code in the container.", retry_after=1.0)
            await asyncio.sleep(_POLL_SECONDS)

    async def _renew(self, project: str, container_id: str, owner: str | None) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            try:
                if owner is not None:
                    await self._store.hold_container(project, container_id, owner, lease=_LEASE_SECONDS)
                await self._store.touch_container(project, container_id)
            except AntiphonError as error:
                logger.warning("the lease of a container could not be renewed: %s", error.message)


def container_not_found(container_id: str, *, param: str = "container_id") -> NotFound:
    return NotFound(f"Container with id '{container_id}' not found.", param=param)
