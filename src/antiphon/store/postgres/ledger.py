"""The ledger of agent runs in PostgreSQL, in the same database as the store."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from antiphon.ledger import Holder, Lease, RunSummary, RunTaken, find_first_run, make_summary
from antiphon.store.postgres.agent_connection import NOW, AgentConnection

if TYPE_CHECKING:
    from asyncpg import Connection

LOCK_HELD = "SELECT 1 FROM agent_runs WHERE run_id = $1 AND owner = $2 FOR NO KEY UPDATE"
APPEND = "INSERT INTO agent_entries (run_id, number, entry) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING 1"
IS_EQUAL = "SELECT entry = $3 FROM agent_entries WHERE run_id = $1 AND number = $2"
UPDATE_RUN = f"""
WITH clock AS (SELECT {NOW} AS now)
INSERT INTO agent_runs (run_id, created_at, updated_at, active_at, status, title)
SELECT $2, floor(now)::bigint, floor(now)::bigint, now, coalesce($3, ''), $4 FROM clock
ON CONFLICT (run_id) DO UPDATE SET
    updated_at = excluded.updated_at,
    active_at = excluded.active_at,
    status = coalesce($3, agent_runs.status),
    title = CASE $4 WHEN '' THEN agent_runs.title ELSE $4 END
"""
READ = "SELECT entry FROM agent_entries WHERE run_id = $1 ORDER BY number"
HOLD = f"""
WITH clock AS (SELECT {NOW} AS now)
UPDATE agent_runs SET owner = $3, leased_until = now + $4, active_at = now FROM clock
WHERE run_id = $2 AND owner IN ('', $3, $5) RETURNING 1
"""
RELEASE = f"""
WITH clock AS (SELECT {NOW} AS now)
UPDATE agent_runs SET owner = '', leased_until = 0, active_at = now FROM clock WHERE run_id = $2 AND owner = $3
"""
FIND_LEASE = f"""
WITH clock AS (SELECT {NOW} AS now)
SELECT owner, leased_until - now, now - active_at FROM agent_runs, clock WHERE run_id = $2
"""
LIST = f"""
WITH clock AS (SELECT {NOW} AS now)
SELECT run_id, created_at, updated_at, status, title, owner, leased_until - now, now - active_at
FROM agent_runs, clock ORDER BY position DESC LIMIT $2
"""
LOCK_OWNER = "SELECT owner FROM agent_runs WHERE run_id = $1 FOR UPDATE"
# The ids that begin with the id of the run and a colon: `;` is the character after it.
FIND_SUBAGENTS = "SELECT run_id FROM agent_runs WHERE run_id > $1 || ':' AND run_id < $1 || ';'"
DELETE = ("DELETE FROM agent_entries WHERE run_id = $1", "DELETE FROM agent_runs WHERE run_id = $1")


class PostgresLedger(AgentConnection):
    """A ledger in a PostgreSQL database, for agents on several machines."""

    def __init__(self, url: str, *, now: Callable[[], float] | None = None) -> None:
        super().__init__(url, noun="ledger", now=now)

    async def append(
        self,
        run_id: str,
        number: int,
        entry: bytes,
        *,
        status: str | None = None,
        title: str = "",
        holder: Holder | None = None,
    ) -> None:
        is_repeated = False

        async def write(connection: "Connection[Any]") -> None:
            nonlocal is_repeated
            is_first, is_repeated = not is_repeated, True
            if holder is not None and not await connection.fetchval(LOCK_HELD, holder.run_id, holder.owner):
                raise RunTaken(holder.run_id)
            if not await connection.fetchval(APPEND, run_id, number, entry):
                # If the connection was lost, the first attempt may have been committed.
                if is_first or not await connection.fetchval(IS_EQUAL, run_id, number, entry):
                    raise RunTaken(run_id)
                return
            await connection.execute(UPDATE_RUN, self._read_clock(), run_id, status, title)

        await self._write(write)

    async def hold(self, run_id: str, owner: str, seconds: float, *, instead_of: str = "") -> bool:
        parameters = (self._read_clock(), run_id, owner, float(seconds), instead_of)
        return await self._write(lambda connection: connection.fetchval(HOLD, *parameters)) is not None

    async def release(self, run_id: str, owner: str) -> None:
        await self._write(lambda connection: connection.execute(RELEASE, self._read_clock(), run_id, owner))

    async def find_lease(self, run_id: str) -> Lease | None:
        row = await self._run(lambda connection: connection.fetchrow(FIND_LEASE, self._read_clock(), run_id))
        return None if row is None else Lease(*row)

    async def read(self, run_id: str) -> Sequence[bytes]:
        return [entry for (entry,) in await self._run(lambda connection: connection.fetch(READ, run_id))]

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        rows = await self._run(lambda connection: connection.fetch(LIST, self._read_clock(), limit))
        return [make_summary(row) for row in rows]

    async def delete(self, run_id: str, *, owner: str = "") -> bool:
        async def delete(connection: "Connection[Any]") -> bool:
            if await connection.fetchval(LOCK_OWNER, run_id) != owner:
                return False
            related = [each for (each,) in await connection.fetch(FIND_SUBAGENTS, run_id)]
            deleted = [(run_id,), *((each,) for each in related if find_first_run(each) == run_id)]
            for statement in DELETE:
                await connection.executemany(statement, deleted)
            return True

        return await self._write(delete)
