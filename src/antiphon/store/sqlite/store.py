"""The default store: one SQLite file. This module has the prompts and joins the other parts."""

import sqlite3

from antiphon.store.sql_prompts import PromptStatements, SqlPrompts, make_version_error
from antiphon.store.sqlite.containers import SqliteContainers
from antiphon.store.sqlite.conversations import SqliteConversations
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.events import SqliteEventLog
from antiphon.store.sqlite.hosted_steps import SqliteHostedSteps
from antiphon.store.sqlite.keys import SqliteKeys
from antiphon.store.sqlite.responses import SqliteResponses
from antiphon.store.sqlite.runs import SqliteRunQueue
from antiphon.store.sqlite.space import SqliteSpace
from antiphon.store.sqlite.usage import SqliteUsage

SAVE = "INSERT INTO prompts (project, id, version, body, created_at) VALUES (?, ?, ?, ?, ?)"

LOAD = "SELECT version, created_at, body FROM prompts WHERE project = ? AND id = ? AND version = ?"

LOAD_NEWEST = """
SELECT version, created_at, body FROM prompts
WHERE place = (SELECT max(place) FROM prompts WHERE project = ? AND id = ?)
"""

LIST = "SELECT id, place, version, created_at FROM prompts WHERE project = ?"

DELETE = "DELETE FROM prompts WHERE project = ? AND id = ?"


class SqlitePrompts(Database, SqlPrompts):
    _prompt_statements = PromptStatements(load=LOAD, load_newest=LOAD_NEWEST, list=LIST, delete=DELETE)

    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        await self._writer.submit(_save, (project, prompt_id, version, body, created_at))


class SqliteStore(
    SqliteResponses,
    SqliteConversations,
    SqliteEventLog,
    SqliteRunQueue,
    SqliteHostedSteps,
    SqlitePrompts,
    SqliteKeys,
    SqliteUsage,
    SqliteContainers,
    SqliteSpace,
):
    """All parts of a store on one file. They share the writer thread, so one transaction can span several parts."""


def _save(
    connection: sqlite3.Connection, project: str, prompt_id: str, version: str, body: bytes, created_at: int
) -> None:
    try:
        connection.execute(SAVE, (project, prompt_id, version, body, created_at))
    except sqlite3.IntegrityError:
        raise make_version_error(prompt_id, version) from None
