"""The event log in PostgreSQL. A row has one batch of events; its key is the number of the last event."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from antiphon.errors import ServerError
from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.record import DAMAGE, EventBatch, pack_events, report_damage, take_events, unpack_events

if TYPE_CHECKING:
    from asyncpg import Connection

# Lock the run for the transaction, so that no other owner can claim it meanwhile. An expired lease counts until then.
HOLD = """
SELECT watched FROM runs WHERE project = $1 AND response_id = $2 AND owner = $3 FOR NO KEY UPDATE
"""

# The lock keeps the response from being deleted meanwhile.
STORED = "SELECT true FROM responses WHERE project = $1 AND id = $2 FOR KEY SHARE"

REACHED = "SELECT EXISTS (SELECT 1 FROM events WHERE project = $1 AND response_id = $2 AND last >= $3)"

APPEND = "INSERT INTO events (project, response_id, last, lines) VALUES ($1, $2, $3, $4)"

# Rows of a page: batches up to this size are read at once. The number of bytes is summed before the contents are read.
READ_PAGE = """
SELECT last, lines FROM (
    SELECT last, lines, sum(length(lines)) OVER (ORDER BY last) - length(lines) AS before FROM events
    WHERE project = $1 AND response_id = $2 AND last > $3 ORDER BY last LIMIT $5
) AS page WHERE before < $4 ORDER BY last
"""

READ = "SELECT last, lines FROM events WHERE project = $1 AND response_id = $2 AND last > $3 ORDER BY last"

# Maximum number of rows in a page.
PAGE_ROWS = 200

DROP = "DELETE FROM events WHERE project = $1 AND response_id = $2"


class PostgresEventLog(PostgresDatabase):
    async def append_events(
        self, project: str, response_id: str, first: int, payloads: Sequence[bytes], *, owner: str | None = None
    ) -> bool:
        batches = pack_events(first, payloads)
        with self._uncertain.track(project, response_id, first) as is_repeated:
            parameters = (project, response_id, batches, owner, is_repeated)
            watched: bool | None = await self._writer.submit(_append, parameters)
        if watched and batches:
            self._notifications.announce("events", response_id)
        return watched is not None

    async def read_events(
        self, project: str, response_id: str, after: int, *, max_bytes: int | None = None
    ) -> list[tuple[int, bytes]]:
        if max_bytes is None:
            rows = await self._reader.submit(READ, (project, response_id, after))
        else:
            rows = await self._reader.submit(READ_PAGE, (project, response_id, after, max_bytes, PAGE_ROWS))
        try:
            return take_events(rows, after, max_bytes)
        except DAMAGE as error:
            raise report_damage(f"events of response {response_id}", error) from None

    async def drop_events(self, project: str, response_id: str, *, owner: str | None = None) -> bool:
        dropped: bool = await self._writer.submit(_drop, (project, response_id, owner))
        return dropped


async def find_missing(
    connection: "Connection[Any]",
    project: str,
    response_id: str,
    batches: Sequence[EventBatch],
    *,
    is_repeated: bool,
) -> Sequence[EventBatch]:
    """Return the batches that have to be appended. The run or the response must be locked.

    Raises ServerError if the log already reaches their first number. If an earlier write of them is uncertain, the log
    may have some of the events: then only the others are returned.
    """
    if not batches:
        return ()
    first = batches[0].first
    if not await connection.fetchval(REACHED, project, response_id, first):
        return batches
    if is_repeated:
        rows = await connection.fetch(READ, project, response_id, first - 1)
        stored = [payload for _, payload in take_events(rows, first - 1, None)]
        payloads = [payload for batch in batches for _, payload in unpack_events(batch.last, batch.lines, -1)]
        if payloads[: len(stored)] == stored:
            return pack_events(first + len(stored), payloads[len(stored) :])
    raise ServerError(f"The event log of {response_id} already reaches number {first}.")


async def append_batches(
    connection: "Connection[Any]", project: str, response_id: str, batches: Sequence[EventBatch]
) -> None:
    """Append consecutive batches that `find_missing` has returned."""
    if batches:
        rows = [(project, response_id, batch.last, batch.lines) for batch in batches]
        await connection.executemany(APPEND, rows)


async def _append(
    connection: "Connection[Any]",
    project: str,
    response_id: str,
    batches: list[EventBatch],
    owner: str | None,
    is_repeated: bool,  # noqa: FBT001 - the writer passes parameters by position
) -> bool | None:
    """Return None if the events may not be appended, else whether a reader may follow the response."""
    if owner is None:
        watched: bool | None = await connection.fetchval(STORED, project, response_id)
    else:
        watched = await connection.fetchval(HOLD, project, response_id, owner)
    if watched is not None:
        missing = await find_missing(connection, project, response_id, batches, is_repeated=is_repeated)
        await append_batches(connection, project, response_id, missing)
    return watched


async def _drop(connection: "Connection[Any]", project: str, response_id: str, owner: str | None) -> bool:
    if owner is not None and await connection.fetchval(HOLD, project, response_id, owner) is not False:
        return False
    await connection.execute(DROP, project, response_id)
    return True
