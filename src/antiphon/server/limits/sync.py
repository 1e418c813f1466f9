"""Exchange of the counts of limits between the processes that use one store.

Every second, a process reports its own counts and reads those of the others. So a limit can be exceeded by the requests
that the other processes admit in about two seconds. The requests of a process that has died count for another minute,
and its responses in progress for ten seconds. Budgets are exact up to the usage that the processes have not written
yet: about ten seconds.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from antiphon.engine.usage import UsageRecorder
from antiphon.errors import AntiphonError
from antiphon.server.limits.limiter import Limiter, Shared
from antiphon.store.usage import MINUTE, STALE_SECONDS, LimitCounts, UsageStore, find_month
from antiphon.tasks import cancel_tasks

logger = logging.getLogger(__name__)

SYNC_SECONDS = 1.0
BUDGET_SECONDS = 5.0


class LimitSync:
    """A task that exchanges the counts of a limiter. `recorder` writes the usage that budgets are compared with."""

    def __init__(
        self,
        limiter: Limiter,
        store: UsageStore,
        recorder: UsageRecorder,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limiter = limiter
        self._store = store
        self._recorder = recorder
        self._now = now
        self._monotonic = monotonic
        self._others: Sequence[LimitCounts] = ()
        self._read_at = monotonic()
        self._node = secrets.token_hex(8)
        self._budgets_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await cancel_tasks(self._task)

    async def exchange(self) -> None:
        """Exchange the counts once. While the store fails, the last counts of others decrease to 0."""
        try:
            changes = self._limiter.list_changes()
            if changes:
                await self._store.report_limit_counts(self._node, changes)
            # Also without counts of its own: the next request may be one of a key that others have counts for.
            self._others = await self._store.list_limit_counts(self._node)
            self._read_at = self._monotonic()
            if self._limiter.has_budgets and time.monotonic() >= self._budgets_at:
                await self.read_budgets()
        except AntiphonError as error:  # the store logs its failures
            logger.debug("the counts of limits were not exchanged: %s", error)
        self._limiter.set_shared(add_counts(self._others, self._monotonic() - self._read_at))

    async def read_budgets(self) -> None:
        """Read the totals of the month, after the usage of this process is written."""
        self._budgets_at = time.monotonic() + BUDGET_SECONDS
        marks: dict[str, tuple[int, float]] = {}
        if await self._recorder.flush(on_taken=lambda: marks.update(self._limiter.mark_charges())):
            self._limiter.set_spending(await self._store.read_spending(find_month(self._now())), marks)

    async def _run(self) -> None:
        while True:
            try:
                await self.exchange()
            except Exception:
                logger.exception("the counts of limits could not be exchanged")
            await asyncio.sleep(SYNC_SECONDS)


def add_counts(counts: Iterable[LimitCounts], seconds: float = 0.0) -> dict[str, Shared]:
    """Return the sums by subject, `seconds` after they were read. They decrease linearly to 0 within a minute."""
    sums: dict[str, Shared] = {}
    for each in counts:
        age = each.age + seconds
        share = max(0.0, 1 - age / MINUTE)
        concurrent = each.concurrent if age <= STALE_SECONDS else 0
        before = sums.get(each.subject, Shared())
        sums[each.subject] = Shared(
            before.requests + each.requests * share,
            before.tokens + each.tokens * share,
            before.concurrent + concurrent,
        )
    return sums
