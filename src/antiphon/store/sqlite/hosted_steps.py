"""The steps of background responses with hosted tools, and claims of effects, in SQLite."""

import sqlite3
from collections.abc import Sequence

from antiphon.errors import ServerError
from antiphon.store.sql_hosted_steps import HostedStepWork, SqlHostedSteps
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.leases import is_owned

COUNT = "SELECT count(*) FROM hosted_steps WHERE project = ? AND response_id = ?"

APPEND = "INSERT INTO hosted_steps (project, response_id, number, step) VALUES (?, ?, ?, ?)"

LOAD = "SELECT step FROM hosted_steps WHERE project = ? AND response_id = ? ORDER BY number"

CLAIM = "INSERT INTO effect_claims (project, key, expires_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"

EXPIRE_CLAIMS = "DELETE FROM effect_claims WHERE expires_at <= ?"


class SqliteHostedSteps(Database, SqlHostedSteps):
    @property
    def _hosted_work(self) -> HostedStepWork:
        return _WORK


def _append(
    connection: sqlite3.Connection, project: str, response_id: str, first: int, steps: Sequence[bytes], owner: str
) -> bool:
    if not is_owned(connection, project, response_id, owner):
        return False
    (count,) = connection.execute(COUNT, (project, response_id)).fetchone()
    if count != first:
        raise ServerError(f"The response {response_id} has {count} hosted steps, not {first}.")
    for number, step in enumerate(steps, first):
        connection.execute(APPEND, (project, response_id, number, step))
    return True


_WORK = HostedStepWork(append=_append, load=LOAD, claim=CLAIM)
