"""Deletion of expired responses and conversations, shared by the SQL stores. One process at a time deletes them."""

import logging
from collections.abc import Callable

from antiphon.store.sql_hosted_steps import EXPIRE_CLAIMS
from antiphon.store.sql_steps import (
    MAX_CLOCK_OFFSET,
    Batch,
    SqlStep,
    StepDatabase,
    Steps,
    TryLock,
    Variants,
    WriteConflict,
    limit_time,
)

logger = logging.getLogger(__name__)

# Number of expired responses or conversations deleted in one transaction, so that other writers wait only briefly.
EXPIRY_STEP = 100

# Expired responses, each with the ids of the responses that continue it. The last response of a chain comes first. A
# row comes after the row that it continues. Others do not count: a cycle in a damaged database would never expire. The
# condition on `continued` is that of the index.
_DUE = """
SELECT due.project, due.id, newer.id FROM (
    SELECT project, id, rowid AS number FROM responses WHERE expires_at <= ? AND {0}
    ORDER BY expires_at DESC, rowid DESC LIMIT ? FOR UPDATE SKIP LOCKED
) AS due LEFT JOIN responses AS newer
    ON newer.project = due.project AND newer.previous_response_id = due.id AND newer.rowid > due.number
"""
DUE = Variants(sqlite=_DUE.format("continued = 0"), postgres=_DUE.format("NOT continued"))

DELETE_EXPIRED = "DELETE FROM responses WHERE project = ? AND id = ?"

MARK_CONTINUED = "UPDATE responses SET continued = TRUE WHERE project = ? AND id = ?"

EXPIRE_CONVERSATIONS = """
DELETE FROM conversations WHERE (project, id) IN (
    SELECT project, id FROM conversations WHERE expires_at <= ? LIMIT ? FOR UPDATE SKIP LOCKED
) RETURNING id
"""

Sweep = Callable[[int], Steps[tuple[int, int]]]


class SqlExpiry(StepDatabase):
    """Base of the classes that delete expired rows by SQL."""

    _has_wrong_clock = False

    async def expire(self, now: int) -> int:
        offset = await self._measure_clock_offset()
        self._report_clock(offset)
        now = limit_time(now, offset)
        expired = 0
        checked = EXPIRY_STEP
        while checked:  # a deleted response may have been the last that continued an expired one
            checked, deleted = await self._sweep(_delete_responses, now)
            expired += deleted
        deleted = EXPIRY_STEP
        while deleted == EXPIRY_STEP:
            _, deleted = await self._sweep(_delete_conversations, now)
            expired += deleted
        await self._sweep(_delete_claims, now)
        return expired

    def _report_clock(self, offset: float) -> None:
        """Log once that the clocks of this machine and of the database differ."""
        is_wrong = abs(offset) > MAX_CLOCK_OFFSET
        if is_wrong and not self._has_wrong_clock:
            if offset < 0:
                text = "ahead of the database's. Expired data is deleted by the clock of the database"
            else:
                text = "behind the database's. Data that this node stores expires too early"
            advice = "Synchronize the clocks of both machines, for example with NTP"
            logger.warning("the clock of this machine is %.0f seconds %s. %s", abs(offset), text, advice)
        self._has_wrong_clock = is_wrong

    async def _sweep(self, work: Sweep, now: int) -> tuple[int, int]:
        """Return how many rows were checked and deleted. Both are 0 while another process deletes expired rows."""
        try:
            return await self._write_apart(_sweep_alone, work, now)
        except WriteConflict:  # the next sweep deletes them
            return 0, 0


def _sweep_alone(work: Sweep, now: int) -> Steps[tuple[int, int]]:
    ((is_locked,),) = yield TryLock("expiry")
    return (yield from work(now)) if is_locked else (0, 0)


def _delete_responses(now: int) -> Steps[tuple[int, int]]:
    """Delete the next expired responses that none continues. Mark the others."""
    due: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for project, response_id, newer_id in (yield SqlStep(DUE, (now, EXPIRY_STEP))):
        newer = due.setdefault((project, response_id), set())
        if newer_id is not None:
            newer.add((project, newer_id))
    deleted: set[tuple[str, str]] = set()
    # Deleting a response can make the one that it continued the last of its chain.
    while last := {key for key, newer in due.items() if key not in deleted and newer <= deleted}:
        deleted |= last
    yield Batch(DELETE_EXPIRED, sorted(deleted))
    yield Batch(MARK_CONTINUED, sorted(due.keys() - deleted))
    return len(due), len(deleted)


def _delete_conversations(now: int) -> Steps[tuple[int, int]]:
    deleted = len((yield SqlStep(EXPIRE_CONVERSATIONS, (now, EXPIRY_STEP))))
    return deleted, deleted


def _delete_claims(now: int) -> Steps[tuple[int, int]]:
    yield SqlStep(EXPIRE_CLAIMS, (now,))
    return 0, 0
