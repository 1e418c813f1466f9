"""The PostgreSQL store, for several servers on one database. This module has the prompts and joins the other parts."""

from antiphon.errors import InvalidRequest
from antiphon.store.base import PromptVersion, StoredPrompt
from antiphon.store.postgres.conversations import PostgresConversations
from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.postgres.events import PostgresEventLog
from antiphon.store.postgres.hosted_steps import PostgresHostedSteps
from antiphon.store.postgres.keys import PostgresKeys
from antiphon.store.postgres.responses import PostgresResponses
from antiphon.store.postgres.runs import PostgresRunQueue
from antiphon.store.postgres.writer import GroupedStatement

SAVE = GroupedStatement(
    """
WITH saved AS (
    INSERT INTO prompts (project, id, version, body, created_at) VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT DO NOTHING RETURNING 1
)
SELECT count(*) FROM saved
"""
)

LOAD = "SELECT version, created_at, body FROM prompts WHERE project = $1 AND id = $2 AND version = $3"

LOAD_NEWEST = """
SELECT version, created_at, body FROM prompts WHERE project = $1 AND id = $2 ORDER BY position DESC LIMIT 1
"""

LIST = "SELECT id, position, version, created_at FROM prompts WHERE project = $1"

DELETE = GroupedStatement(
    "WITH deleted AS (DELETE FROM prompts WHERE project = $1 AND id = $2 RETURNING 1) SELECT count(*) FROM deleted"
)


class PostgresPrompts(PostgresDatabase):
    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        saved: int = await self._writer.submit(SAVE, (project, prompt_id, version, body, created_at))
        if not saved:
            raise InvalidRequest(
                f"The prompt '{prompt_id}' already has a version '{version}'.", param="version", code="invalid_value"
            )

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


class PostgresStore(
    PostgresResponses,
    PostgresConversations,
    PostgresEventLog,
    PostgresRunQueue,
    PostgresHostedSteps,
    PostgresPrompts,
    PostgresKeys,
):
    """All parts of a store on one database. They share the writer, so one transaction can span several parts."""
