"""The limit `stored_bytes`: the size of the data of a project in the store.

The size is measured when a request needs it, at most once in an interval, because it takes a scan of the project's
rows. So a project can exceed its limit by the data that it writes in one interval.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping

from antiphon.bounds import remove_oldest
from antiphon.engine.policy import Policy
from antiphon.errors import AntiphonError, QuotaExceeded
from antiphon.protocol.request import CreateRequest
from antiphon.store.usage import UsageStore

logger = logging.getLogger(__name__)


MEASURE_SECONDS = 5.0
"""Shortest time between two measurements of a project."""

# The share of the time that measurements may take. A measurement that took long is repeated later.
_MAX_SHARE = 0.02

_MAX_PROJECTS = 10_000


class _Measurement:
    """The size of a project's data. `task` is set while it is measured again."""

    __slots__ = ("expires_at", "size", "task")

    def __init__(self) -> None:
        self.size = 0
        self.expires_at = -math.inf
        self.task: asyncio.Task[None] | None = None


class StorageQuota:
    """Refuses requests that would store more data. `limits` has the limits of projects that differ from `limit`."""

    def __init__(
        self,
        store: UsageStore,
        limit: int | None,
        limits: Mapping[str, int],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._limit = limit
        self._limits = limits
        self._monotonic = monotonic
        self._measurements: dict[str, _Measurement] = {}
        self.refusals = 0

    @classmethod
    def make(cls, store: UsageStore, policy: Policy) -> "StorageQuota | None":
        """Return the quota of a policy, or None if no project has one."""
        if policy.stored_bytes is None and not policy.stored_bytes_by_project:
            return None
        return cls(store, policy.stored_bytes, policy.stored_bytes_by_project)

    async def check(self, project: str) -> None:
        """Raise QuotaExceeded if the data of the project exceeds its limit. The first check waits for a measurement."""
        limit = self._limits.get(project, self._limit)
        if limit is None:
            return
        measurement = self._measurements.setdefault(project, _Measurement())
        remove_oldest(self._measurements, _MAX_PROJECTS)
        if measurement.task is None and self._monotonic() >= measurement.expires_at:
            measurement.task = asyncio.create_task(self._measure(project, measurement))
        if measurement.task is not None and (measurement.expires_at == -math.inf or measurement.size >= limit):
            # Data may have been deleted since: a project at its limit waits for the new size.
            await asyncio.shield(measurement.task)
        if measurement.size >= limit:
            self.refusals += 1
            name = f"projects.{project}.limits.stored_bytes" if project in self._limits else "limits.stored_bytes"
            raise QuotaExceeded(
                f"The data of this project has {measurement.size} bytes, and the limit `{name}` is {limit}. "
                "Delete responses or conversations, or send 'store: false' without a conversation.",
            )

    async def _measure(self, project: str, measurement: _Measurement) -> None:
        started_at = self._monotonic()
        try:
            measurement.size = await self._store.measure_stored_bytes(project)
        except AntiphonError as error:  # the store logs its failures, and refuses to write
            logger.debug("the data of a project was not measured: %s", error)
        finally:
            now = self._monotonic()
            measurement.expires_at = now + max(MEASURE_SECONDS, (now - started_at) / _MAX_SHARE)
            measurement.task = None


def stores_data(request: CreateRequest) -> bool:
    """Return True if the response of a request will be stored, or its items in a conversation."""
    return request.store is not False or request.background is True or request.conversation is not None
