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
_POLL_SECONDS = 0.2


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

        Raises NotFound if the container is deleted, and Unavailable after the waiting time.
        """
        owner = secrets.token_hex(16)
        lock = self._locks.setdefault(container_id, asyncio.Lock())
        async with lock:
            await self._wait(project, container_id, owner)
            renewal = asyncio.create_task(self._renew(project, container_id, owner))
            try:
                yield owner
            finally:
                renewal.cancel()

    async def _wait(self, project: str, container_id: str, owner: str) -> None:
        deadline = time.monotonic() + self._wait_seconds + _LEASE_SECONDS
        while not await self._store.hold_container(project, container_id, owner, lease=_LEASE_SECONDS):
            if await self._store.load_container(project, container_id) is None:
                raise container_not_found(container_id)
            if time.monotonic() > deadline:
                raise Unavailable("Another server runs code in the container.", retry_after=1.0)
            await asyncio.sleep(_POLL_SECONDS)

    async def _renew(self, project: str, container_id: str, owner: str) -> None:
        while True:
            await asyncio.sleep(_LEASE_SECONDS / 3)
            try:
                await self._store.hold_container(project, container_id, owner, lease=_LEASE_SECONDS)
            except AntiphonError as error:
                logger.warning("the lease of a container could not be renewed: %s", error.message)


def container_not_found(container_id: str, *, param: str = "container_id") -> NotFound:
    return NotFound(f"Container with id '{container_id}' not found.", param=param)
