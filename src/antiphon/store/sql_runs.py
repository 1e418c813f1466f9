"""The part of the queue of background runs that the SQL stores share. Claims are in their own `runs.py`."""

from collections.abc import Sequence

from antiphon import offload
from antiphon.store.base import NO_LIMITS, QueueFull, RunKey, StoredResponse
from antiphon.store.changes import CancelRequested, RunsQueued
from antiphon.store.limits import MAX_UNCOUNTED_ATTEMPT, RunLimits
from antiphon.store.record import ForeignItem, pack_with_foreign_items
from antiphon.store.sql_responses import INDEX_ITEM, INSERT, SqlResponses
from antiphon.store.sql_steps import Batch, Clock, SqliteStep, SqlStep, Steps, Variants

_RUN_COLUMNS = "project, response_id, request, model, configuration_id, free_since, watched"

# The parameters begin with the row of the response. PostgreSQL inserts both rows with one statement.
ENQUEUE = Variants(
    sqlite=f"INSERT INTO runs ({_RUN_COLUMNS}) VALUES (?1, ?2, ?10, ?11, ?12, ?13, ?14)",
    postgres=f"""
WITH saved AS ({INSERT.one_row} RETURNING 1)
INSERT INTO runs ({_RUN_COLUMNS}) SELECT ?1, ?2, ?10, ?11, ?12, NOW(?13), ?14 FROM saved
""",
)

COUNT_WAITING = "SELECT count(*) FROM runs WHERE owner IS NULL AND NOT cancelled"

COUNT_WAITING_OF_PROJECT = f"{COUNT_WAITING} AND project = ?"

# Only if the process has waiting runs: a server without work does not write.
RENEW_CONFIGURATION = """
INSERT INTO configurations (configuration_id, alive_until)
SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM runs WHERE owner IS NULL AND NOT cancelled AND configuration_id = ?1)
ON CONFLICT (configuration_id) DO UPDATE SET alive_until = excluded.alive_until
"""

RENEW = """
UPDATE runs SET leased_until = ?, lease = ? WHERE owner = ? RETURNING project, response_id, cancelled
"""

# The clock may have been set back. The first two conditions are those of an index.
SHORTEN_LEASES = """
UPDATE runs SET leased_until = ?1 + lease
WHERE owner IS NOT NULL AND leased_until > ?1 AND leased_until > ?1 + lease
"""

RELEASE = "UPDATE runs SET owner = NULL, leased_until = NULL, free_since = NOW(?) WHERE owner = ?"

END_LEASES = "UPDATE runs SET leased_until = NOW(?1) WHERE owner = ?2 AND leased_until > NOW(?1)"

RETURN = """
UPDATE runs SET owner = NULL, leased_until = NULL, free_since = NOW(?) - ?
WHERE owner = ? AND project = ? AND response_id = ?
"""

# Clear the owner but keep the expiry.
CLEAR_OWNER = "UPDATE runs SET owner = '' WHERE project = ? AND response_id = ? AND owner = ?"

# Executed twice after a lost answer, it withdraws one too many: the run is given up one crash later.
WITHDRAW_INTERRUPTION = """
UPDATE runs SET interruptions = interruptions - 1
WHERE project = ? AND response_id = ? AND attempt > ? AND attempt <= ? AND interruptions > 0
"""

WATCHED = "SELECT watched FROM runs WHERE project = ? AND response_id = ?"

WATCH = "UPDATE runs SET watched = TRUE WHERE project = ? AND response_id = ?"

CANCEL = "UPDATE runs SET cancelled = TRUE WHERE project = ? AND response_id = ?"


class SqlRuns(SqlResponses):
    """Base of the classes that store the queue of runs by SQL. A run and its response are written together."""

    configuration_id: str

    async def enqueue(
        self,
        project: str,
        stored: StoredResponse,
        request: bytes,
        *,
        limits: RunLimits = NO_LIMITS,
        watched: bool = False,
    ) -> None:
        record, foreign = await offload.run(pack_with_foreign_items, stored)
        run = request, stored.response.model, self.configuration_id, self._read_clock(), watched
        await self._write(self._enqueue, (project, *record), run, foreign, limits)
        self.announce(RunsQueued())

    def _enqueue(
        self, row: Sequence[object], run: Sequence[object], foreign: list[ForeignItem], limits: RunLimits
    ) -> Steps[None]:
        project, response_id = str(row[0]), str(row[1])
        yield from _check_waiting(project, limits)
        yield SqliteStep(INSERT.one_row, row)
        yield SqlStep(ENQUEUE, (*row, *run))
        yield Batch(INDEX_ITEM, self._make_index_rows(project, response_id, foreign))

    async def renew(self, owner: str, *, lease: float) -> dict[RunKey, bool]:
        return await self._write(_renew, owner, self.configuration_id, lease)

    async def release(self, owner: str) -> None:
        if await self._change(RELEASE, (self._read_clock(), owner), is_idempotent=True):
            self.announce(RunsQueued())

    async def end_leases(self, owner: str) -> None:
        if await self._change(END_LEASES, (self._read_clock(), owner), is_idempotent=True):
            self.announce(RunsQueued())

    async def return_run(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
        free_seconds = self._now() - free_since
        parameters = (self._read_clock(), free_seconds, owner, project, response_id)
        await self._change(RETURN, parameters, is_idempotent=True)
        if free_seconds >= 0:
            self.announce(RunsQueued())

    async def stop_renewing(self, owner: str, project: str, response_id: str) -> None:
        await self._change(CLEAR_OWNER, (project, response_id, owner), is_idempotent=True)

    async def withdraw_interruption(self, project: str, response_id: str, *, attempt: int) -> bool:
        parameters = project, response_id, attempt, MAX_UNCOUNTED_ATTEMPT
        return await self._change(WITHDRAW_INTERRUPTION, parameters) > 0

    async def mark_watched(self, project: str, response_id: str) -> bool:
        # Most readers follow a run that is already watched, and need not wait for a commit.
        rows = await self._fetch(WATCHED, (project, response_id))
        if not rows:
            return False
        (watched,) = rows[0]
        return bool(watched) or await self._change(WATCH, (project, response_id), is_idempotent=True) > 0

    async def request_cancel(self, project: str, response_id: str) -> bool:
        is_marked = await self._change(CANCEL, (project, response_id), is_idempotent=True) > 0
        if is_marked:
            self.announce(CancelRequested(response_id))
        return is_marked

    async def count_waiting(self) -> int:
        ((waiting,),) = await self._fetch(COUNT_WAITING, ())
        return int(waiting)


def _check_waiting(project: str, limits: RunLimits) -> Steps[None]:
    """Raise QueueFull if the project or the whole queue has as many waiting runs as allowed.

    Runs that other processes add at the same moment are not counted in PostgreSQL.
    """
    own, total = limits.queued_per_project, limits.queued
    if own is not None:
        ((waiting,),) = yield SqlStep(COUNT_WAITING_OF_PROJECT, (project,))
        if waiting >= own:
            raise QueueFull(waiting, is_project=True)
    if total is not None:
        ((waiting,),) = yield SqlStep(COUNT_WAITING)
        if waiting >= total:
            raise QueueFull(waiting, is_project=False)


def _renew(owner: str, configuration_id: str, lease: float) -> Steps[dict[RunKey, bool]]:
    ((now,),) = yield Clock()
    yield SqlStep(RENEW_CONFIGURATION, (configuration_id, now + lease))
    rows: Sequence[tuple[str, str, bool]] = yield SqlStep(RENEW, (now + lease, lease, owner))
    yield SqlStep(SHORTEN_LEASES, (now,))
    return {RunKey(project, response_id): bool(cancelled) for project, response_id, cancelled in rows}
