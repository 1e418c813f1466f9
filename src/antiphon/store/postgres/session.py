"""Sessions of agents in PostgreSQL, in the same database as the store."""

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon.errors import ConfigError
from antiphon.ledger import Lease
from antiphon.protocol.json_text import JsonObject
from antiphon.session import WAIT_SECONDS, Trim, apply_trim, check_items, check_trim
from antiphon.store.postgres.agent_connection import NOW, AgentConnection

if TYPE_CHECKING:
    from asyncpg import Connection

HOLD = f"""
WITH clock AS (SELECT {NOW} AS now)
INSERT INTO agent_sessions (session_id, owner, leased_until, active_at) SELECT $2, $3, now + $4, now FROM clock
ON CONFLICT (session_id) DO UPDATE
SET owner = excluded.owner, leased_until = excluded.leased_until, active_at = excluded.active_at
WHERE agent_sessions.owner IN ('', $3, $5) RETURNING 1
"""
RELEASE = "UPDATE agent_sessions SET owner = '', leased_until = 0 WHERE session_id = $1 AND owner = $2"
FIND_LEASE = f"""
WITH clock AS (SELECT {NOW} AS now)
SELECT owner, leased_until - now, now - active_at FROM agent_sessions, clock WHERE session_id = $2
"""
# Items are added at the end by one transaction at a time.
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))"
LIST = """
SELECT item FROM agent_session_items WHERE session_id = $1 ORDER BY run_number DESC, number DESC LIMIT $2
"""
FIND_RUN = """
SELECT coalesce(
    (SELECT run_number FROM agent_session_items WHERE session_id = $1 AND run_id = $2 LIMIT 1),
    (SELECT coalesce(max(run_number), 0) + 1 FROM agent_session_items WHERE session_id = $1)
)
"""
DELETE_RUN = "DELETE FROM agent_session_items WHERE session_id = $1 AND run_number = $2"
ADD = "INSERT INTO agent_session_items (session_id, run_number, number, run_id, item) VALUES ($1, $2, $3, $4, $5)"
POP = """
DELETE FROM agent_session_items WHERE (session_id, run_number, number) IN (
    SELECT session_id, run_number, number FROM agent_session_items
    WHERE session_id = $1 ORDER BY run_number DESC, number DESC LIMIT 1
) RETURNING item
"""
CLEAR = "DELETE FROM agent_session_items WHERE session_id = $1"


class PostgresSession(AgentConnection):
    """A session in a PostgreSQL database, for agents on several machines. `trim` selects the items that a run reads."""

    appends_only = False

    def __init__(
        self,
        url: str,
        session_id: str,
        *,
        trim: Trim | None = None,
        wait_seconds: float = WAIT_SECONDS,
        now: Callable[[], float] | None = None,
    ) -> None:
        if not session_id:
            raise ConfigError("session_id: a session needs an id.")
        if "\0" in session_id:
            raise ConfigError("session_id: PostgreSQL does not store the character U+0000.")
        super().__init__(url, noun="session", now=now)
        self.session_id = session_id
        self.wait_seconds = wait_seconds
        self._trim = check_trim(trim)

    async def load(self) -> list[JsonObject]:
        return await apply_trim(self._trim, await self.list_items())

    async def save_run(self, run_id: str, items: Sequence[JsonObject]) -> None:
        encoded = [msgspec.json.encode(item) for item in items]
        session_id = self.session_id
        # With an id, items that were added before a connection was lost are found again.
        run_id = run_id or f"added-{secrets.token_hex(8)}"

        async def write(connection: "Connection[Any]") -> None:
            await connection.execute(LOCK, session_id)
            number = await connection.fetchval(FIND_RUN, session_id, run_id)
            await connection.execute(DELETE_RUN, session_id, number)
            rows = [(session_id, number, index, run_id, item) for index, item in enumerate(encoded)]
            await connection.executemany(ADD, rows)

        await self._write(write)

    async def list_items(self, *, limit: int | None = None) -> list[JsonObject]:
        rows = await self._run(lambda connection: connection.fetch(LIST, self.session_id, limit))
        return [msgspec.json.decode(item) for (item,) in reversed(rows)]

    async def add_items(self, items: Sequence[JsonObject]) -> None:
        await self.save_run("", check_items(items))

    async def pop_item(self) -> JsonObject | None:
        async def pop(connection: "Connection[Any]") -> bytes | None:
            await connection.execute(LOCK, self.session_id)
            item: bytes | None = await connection.fetchval(POP, self.session_id)
            return item

        item = await self._write(pop, is_repeatable=False)
        return None if item is None else msgspec.json.decode(item)

    async def clear(self) -> None:
        await self._write(lambda connection: connection.execute(CLEAR, self.session_id))

    async def hold(self, run_id: str, owner: str, seconds: float, *, instead_of: str = "") -> bool:
        parameters = (self._read_clock(), run_id, owner, float(seconds), instead_of)
        return await self._write(lambda connection: connection.fetchval(HOLD, *parameters)) is not None

    async def release(self, run_id: str, owner: str) -> None:
        await self._write(lambda connection: connection.execute(RELEASE, run_id, owner))

    async def find_lease(self, run_id: str) -> Lease | None:
        row = await self._run(lambda connection: connection.fetchrow(FIND_LEASE, self._read_clock(), run_id))
        return None if row is None else Lease(*row)
