"""Prompts in a store."""

from typing import NamedTuple, Protocol


class PromptVersion(NamedTuple):
    """One version of a prompt, without its body."""

    prompt_id: str
    version: str
    created_at: int


class StoredPrompt(NamedTuple):
    """One version of a prompt. `body` has the bytes given to `save_prompt`."""

    version: str
    created_at: int
    body: bytes


class PromptStore(Protocol):
    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        """Save a new version of a prompt. Raises InvalidRequest if the version exists: versions do not change."""

    async def load_prompt(self, project: str, prompt_id: str, version: str | None) -> StoredPrompt | None:
        """Return a version of a prompt, or None if there is none. Version None is the one that was saved last."""

    async def list_prompts(self, project: str) -> list[PromptVersion]:
        """Return every version of every prompt, by id, then in the order in which they were saved."""

    async def delete_prompt(self, project: str, prompt_id: str) -> bool:
        """Delete a prompt with all its versions. Return False if there was none."""
