"""The PostgreSQL store, for several servers on one database. This module has the prompts and joins the other parts."""

from antiphon.store.postgres.containers import PostgresContainers
from antiphon.store.postgres.conversations import PostgresConversations
from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.postgres.events import PostgresEventLog
from antiphon.store.postgres.files import PostgresFileCheck
from antiphon.store.postgres.hosted_steps import PostgresHostedSteps
from antiphon.store.postgres.keys import PostgresKeys
from antiphon.store.postgres.responses import PostgresResponses
from antiphon.store.postgres.runs import PostgresRunQueue
from antiphon.store.postgres.usage import PostgresUsage
from antiphon.store.postgres.writer import GroupedStatement
from antiphon.store.sql_prompts import PromptStatements, SqlPrompts, make_version_error

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


class PostgresPrompts(PostgresDatabase, SqlPrompts):
    _prompt_statements = PromptStatements(load=LOAD, load_newest=LOAD_NEWEST, list=LIST, delete=DELETE)

    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        saved: int = await self._writer.submit(SAVE, (project, prompt_id, version, body, created_at))
        if not saved:
            raise make_version_error(prompt_id, version)


class PostgresStore(
    PostgresResponses,
    PostgresConversations,
    PostgresEventLog,
    PostgresRunQueue,
    PostgresHostedSteps,
    PostgresPrompts,
    PostgresKeys,
    PostgresFileCheck,
    PostgresUsage,
    PostgresContainers,
):
    """All parts of a store on one database. They share the writer, so one transaction can span several parts."""
