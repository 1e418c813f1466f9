"""Prompts in a table, shared by the SQL stores."""

from antiphon.errors import InvalidRequest
from antiphon.store.object_limits import check_number
from antiphon.store.prompts import PromptVersion, StoredPrompt
from antiphon.store.sql_steps import Lock, SqlStep, StepDatabase, Steps

SAVE = """
INSERT INTO prompts (project, id, version, body, created_at) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id
"""
COUNT = "SELECT count(*) FROM prompts WHERE project = ?"
LOAD = "SELECT version, created_at, body FROM prompts WHERE project = ? AND id = ? AND version = ?"
LOAD_NEWEST = """
SELECT version, created_at, body FROM prompts
WHERE position = (SELECT max(position) FROM prompts WHERE project = ? AND id = ?)
"""
LIST = "SELECT id, position, version, created_at FROM prompts WHERE project = ?"
DELETE = "DELETE FROM prompts WHERE project = ? AND id = ?"


def _save(row: tuple[str, str, str, bytes, int], max_prompts: int) -> Steps[bool]:
    yield Lock(f"prompts of {row[0]}")
    ((number,),) = yield SqlStep(COUNT, (row[0],))
    check_number(number, max_prompts, "versions of prompts", setting="max_prompts")
    return bool((yield SqlStep(SAVE, row)))


class SqlPrompts(StepDatabase):
    """Base of the classes that store prompts by SQL."""

    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        row = (project, prompt_id, version, body, created_at)
        if not await self._write(_save, row, self._limits.max_prompts):
            message = f"The prompt '{prompt_id}' already has a version '{version}'."
            raise InvalidRequest(message, param="version", code="invalid_value")

    async def load_prompt(self, project: str, prompt_id: str, version: str | None) -> StoredPrompt | None:
        if version is None:
            rows = await self._fetch(LOAD_NEWEST, (project, prompt_id))
        else:
            rows = await self._fetch(LOAD, (project, prompt_id, version))
        return StoredPrompt(*rows[0]) if rows else None

    async def list_prompts(self, project: str) -> list[PromptVersion]:
        rows = await self._fetch(LIST, (project,))
        return [PromptVersion(prompt_id, version, created_at) for prompt_id, _, version, created_at in sorted(rows)]

    async def delete_prompt(self, project: str, prompt_id: str) -> bool:
        return await self._change(DELETE, (project, prompt_id)) > 0
