"""Prompt templates in memory."""

from antiphon.errors import InvalidRequest
from antiphon.store.base import PromptVersion, StoredPrompt
from antiphon.store.memory.tables import Memory, PromptRow


class Prompts(Memory):
    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        versions = self._tables.prompts.setdefault((project, prompt_id), {})
        if version in versions:
            raise InvalidRequest(
                f"The prompt '{prompt_id}' already has a version '{version}'.", param="version", code="invalid_value"
            )
        versions[version] = PromptRow(body=body, created_at=created_at)

    async def load_prompt(self, project: str, prompt_id: str, version: str | None) -> StoredPrompt | None:
        versions = self._tables.prompts.get((project, prompt_id), {})
        wanted = next(reversed(versions), "") if version is None else version
        row = versions.get(wanted)
        return None if row is None else StoredPrompt(wanted, row.created_at, row.body)

    async def list_prompts(self, project: str) -> list[PromptVersion]:
        return [
            PromptVersion(prompt_id, version, row.created_at)
            for (owner, prompt_id), versions in sorted(self._tables.prompts.items(), key=lambda entry: entry[0])
            if owner == project
            for version, row in versions.items()
        ]

    async def delete_prompt(self, project: str, prompt_id: str) -> bool:
        return self._tables.prompts.pop((project, prompt_id), None) is not None
