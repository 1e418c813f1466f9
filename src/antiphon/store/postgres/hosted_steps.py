"""The steps of background responses with hosted tools, and claims of effects, in PostgreSQL."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from antiphon.errors import ServerError
from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.postgres.events import HOLD
from antiphon.store.postgres.writer import GroupedStatement
from antiphon.store.sql_hosted_steps import HostedStepWork, SqlHostedSteps

if TYPE_CHECKING:
    from asyncpg import Connection

COUNT = "SELECT count(*) FROM hosted_steps WHERE project = $1 AND response_id = $2"

APPEND = "INSERT INTO hosted_steps (project, response_id, number, step) VALUES ($1, $2, $3, $4)"

LOAD = "SELECT step FROM hosted_steps WHERE project = $1 AND response_id = $2 ORDER BY number"

CLAIM = GroupedStatement(
    """
WITH claimed AS (
    INSERT INTO effect_claims (project, key, expires_at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING 1
)
SELECT count(*) FROM claimed
"""
)

EXPIRE_CLAIMS = "DELETE FROM effect_claims WHERE expires_at <= $1"


class PostgresHostedSteps(PostgresDatabase, SqlHostedSteps):
    @property
    def _hosted_work(self) -> HostedStepWork:
        return _WORK


async def _append(
    connection: "Connection[Any]", project: str, response_id: str, first: int, steps: Sequence[bytes], owner: str
) -> bool:
    if await connection.fetchval(HOLD, project, response_id, owner) is None:
        return False
    count = await connection.fetchval(COUNT, project, response_id)
    if count != first:
        raise ServerError(f"The response {response_id} has {count} hosted steps, not {first}.")
    rows = [(project, response_id, number, step) for number, step in enumerate(steps, first)]
    await connection.executemany(APPEND, rows)
    return True


_WORK = HostedStepWork(append=_append, load=LOAD, claim=CLAIM)
