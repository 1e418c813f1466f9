"""The part of the event log that the SQL stores share.

A row is one batch of events, identified by the number of its last event.
"""

from collections.abc import Sequence

from antiphon.errors import ServerError
from antiphon.store.event_batches import EventBatch, pack_events, take_events, unpack_events
from antiphon.store.sql_steps import Batch, SqlStep, StepDatabase, Steps, Variants

# Lock the run for the transaction, so that no other owner can claim it meanwhile. An expired lease counts until then.
HOLD = "SELECT watched FROM runs WHERE project = ? AND response_id = ? AND owner = ? FOR NO KEY UPDATE"

# The lock keeps the response from being deleted meanwhile.
STORED = "SELECT 1 FROM responses WHERE project = ? AND id = ? FOR KEY SHARE"

REACHED = "SELECT 1 FROM events WHERE project = ? AND response_id = ? AND last >= ? LIMIT 1"

READ = "SELECT last, lines FROM events WHERE project = ? AND response_id = ? AND last > ? ORDER BY last"

_SEARCH = """
SELECT last, lines FROM events WHERE project = ?1 AND response_id = ?2 AND last >= ?4 AND (
    last = ?4 OR last = (SELECT max(last) FROM events WHERE project = ?1 AND response_id = ?2) OR {contains}
) ORDER BY last
"""

# The cast is for damaged rows, which may contain a value of another type.
SEARCH = Variants(
    sqlite=_SEARCH.format(contains="instr(CAST(lines AS BLOB), ?3) > 0"),
    postgres=_SEARCH.format(contains="position(?3 IN lines) > 0"),
)

APPEND = "INSERT INTO events (project, response_id, last, lines) VALUES (?, ?, ?, ?)"

# One batch of the owner of a run, if the log does not reach its first number. PostgreSQL reads the log as it was before
# a wait for the lock of the run. That is enough: only another owner could have changed it meanwhile, and then this one
# is not found.
APPEND_OWNED = """
INSERT INTO events (project, response_id, last, lines) SELECT ?1, ?2, ?3, ?4
WHERE EXISTS (SELECT 1 FROM runs WHERE project = ?1 AND response_id = ?2 AND owner = ?5 FOR NO KEY UPDATE)
    AND NOT EXISTS (SELECT 1 FROM events WHERE project = ?1 AND response_id = ?2 AND last >= ?6)
"""

DROP = "DELETE FROM events WHERE project = ? AND response_id = ?"


class SqlEventLog(StepDatabase):
    """Base of the classes that store events by SQL."""

    async def append_events(
        self, project: str, response_id: str, first: int, payloads: Sequence[bytes], *, owner: str | None = None
    ) -> bool:
        batches = pack_events(first, payloads)
        with self._track_write(project, response_id, first) as is_repeated:
            if owner is not None and len(batches) == 1 and not is_repeated:
                row = project, response_id, batches[0].last, batches[0].lines, owner, first
                if await self._change(APPEND_OWNED, row):
                    return True
            return await self._write(_append, project, response_id, batches, owner, is_repeated)

    async def search_events(
        self, project: str, response_id: str, text: bytes, *, start: int
    ) -> list[tuple[int, bytes]]:
        rows = await self._fetch(SEARCH, (project, response_id, text, start))
        return [(last, lines) for last, lines in rows if isinstance(lines, bytes)]

    async def drop_events(self, project: str, response_id: str, *, owner: str | None = None) -> bool:
        return await self._write(_drop, project, response_id, owner)


def find_missing(
    project: str, response_id: str, batches: Sequence[EventBatch], *, is_repeated: bool
) -> Steps[Sequence[EventBatch]]:
    """Return the batches that have to be appended. The run or the response must be locked.

    Raises ServerError if the log already reaches their first number. If an earlier write of them is uncertain, the log
    may have some of the events: then only the others are returned.
    """
    if not batches:
        return ()
    first = batches[0].first
    if not (yield SqlStep(REACHED, (project, response_id, first))):
        return batches
    if is_repeated:
        rows = yield SqlStep(READ, (project, response_id, first - 1))
        stored = [payload for _, payload in take_events(rows, first - 1, None)]
        payloads = [payload for batch in batches for _, payload in unpack_events(batch.last, batch.lines, -1)]
        if payloads[: len(stored)] == stored:
            return pack_events(first + len(stored), payloads[len(stored) :])
    raise ServerError(f"The event log of {response_id} already reaches number {first}.")


def append_batches(project: str, response_id: str, batches: Sequence[EventBatch]) -> Steps[None]:
    """Append batches that `find_missing` has returned."""
    yield Batch(APPEND, [(project, response_id, batch.last, batch.lines) for batch in batches])


def _append(
    project: str,
    response_id: str,
    batches: list[EventBatch],
    owner: str | None,
    is_repeated: bool,  # noqa: FBT001 - steps get their parameters by position
) -> Steps[bool]:
    """Return False if the events may not be appended."""
    if owner is None:
        held = yield SqlStep(STORED, (project, response_id))
    else:
        held = yield SqlStep(HOLD, (project, response_id, owner))
    if not held:
        return False
    missing = yield from find_missing(project, response_id, batches, is_repeated=is_repeated)
    yield from append_batches(project, response_id, missing)
    return True


def _drop(project: str, response_id: str, owner: str | None) -> Steps[bool]:
    if owner is not None:
        held = yield SqlStep(HOLD, (project, response_id, owner))
        if not held or held[0][0]:  # a reader follows the run
            return False
    yield SqlStep(DROP, (project, response_id))
    return True
