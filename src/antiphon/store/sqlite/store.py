"""The default store: one SQLite file. This module has the prompts and joins the other parts."""

import sqlite3

from antiphon.errors import InvalidRequest
from antiphon.store.base import PromptVersion, StoredPrompt
from antiphon.store.sqlite.containers import SqliteContainers
from antiphon.store.sqlite.conversations import SqliteConversations
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.events import SqliteEventLog
from antiphon.store.sqlite.hosted_steps import SqliteHostedSteps
from antiphon.store.sqlite.keys import SqliteKeys
from antiphon.store.sqlite.responses import SqliteResponses
from antiphon.store.sqlite.runs import SqliteRunQueue
from antiphon.store.sqlite.space import SqliteSpace

SAVE = "INSERT INTO prompts (project, id, version, body, created_at) VALUES (?, ?, ?, ?, ?)"

LOAD = "SELECT version, created_at, body FROM prompts WHERE project = ? AND id = ? AND version = ?"

LOAD_NEWEST = """
SELECT version, created_at, body FROM prompts
WHERE place = (SELECT max(place) FROM prompts WHERE project = ? AND id = ?)
"""

LIST = "SELECT id, place, version, created_at FROM prompts WHERE project = ?"

DELETE = "DELETE FROM prompts WHERE project = ? AND id = ?"


class SqlitePrompts(Database):
    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        await self._writer.submit(_save, (project, prompt_id, version, body, created_at))

    async def load_prompt(self, project: str, prompt_id: str, version: str | None) -> StoredPrompt | None:
        if version is None:
            rows = await self._reader.submit(LOAD_NEWEST, (project, prompt_id))
        else:
            rows = await self._reader.submit(LOAD, (project, prompt_id, version))
        return StoredPrompt(*rows[0]) if rows else None

    async def list_prompts(self, project: str) -> list[PromptVersion]:
        rows = await self._reader.submit(LIST, (project,))
        return [PromptVersion(prompt_id, version, created_at) for prompt_id, _, version, created_at in sorted(rows)]

    async def delete_prompt(self, project: str, prompt_id: str) -> bool:
        deleted: int = await self._writer.submit(DELETE, (project, prompt_id))
        return deleted > 0


class SqliteStore(
    SqliteResponses,
    SqliteConversations,
    SqliteEventLog,
    SqliteRunQueue,
    SqliteHostedSteps,
    SqlitePrompts,
    SqliteKeys,
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
        raise InvalidRequest(
            f"The prompt '{prompt_id}' already has a version '{version}'.", param="version", code="invalid_value"
        ) from None
