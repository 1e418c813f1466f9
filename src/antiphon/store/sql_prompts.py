"""Prompts in a table, shared by the SQL stores. Each has its own statements, and saves in its own way."""

from typing import Any, NamedTuple

from antiphon.errors import InvalidRequest
from antiphon.store.base import PromptVersion, StoredPrompt
from antiphon.store.sql_work import SqlDatabase


class PromptStatements(NamedTuple):
    """The statements of `SqlPrompts`. A row of `list` has the id, the order of saving, the version and the time."""

    load: str
    load_newest: str
    list: str
    delete: Any


class SqlPrompts(SqlDatabase):
    """Base of the classes that store prompts by SQL."""

    _prompt_statements: PromptStatements

    async def load_prompt(self, project: str, prompt_id: str, version: str | None) -> StoredPrompt | None:
        statements = self._prompt_statements
        if version is None:
            rows = await self._reader.submit(statements.load_newest, (project, prompt_id))
        else:
            rows = await self._reader.submit(statements.load, (project, prompt_id, version))
        return StoredPrompt(*rows[0]) if rows else None

    async def list_prompts(self, project: str) -> list[PromptVersion]:
        rows = await self._reader.submit(self._prompt_statements.list, (project,))
        return [PromptVersion(prompt_id, version, created_at) for prompt_id, _, version, created_at in sorted(rows)]

    async def delete_prompt(self, project: str, prompt_id: str) -> bool:
        deleted: int = await self._writer.submit(self._prompt_statements.delete, (project, prompt_id))
        return deleted > 0


def make_version_error(prompt_id: str, version: str) -> InvalidRequest:
    """Return the error about a version that exists already."""
    message = f"The prompt '{prompt_id}' already has a version '{version}'."
    return InvalidRequest(message, param="version", code="invalid_value")
