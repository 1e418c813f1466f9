"""Prompts, in all stores."""

import pytest

from antiphon.errors import InvalidRequest
from antiphon.store.base import Store
from antiphon.store.prompts import PromptVersion, StoredPrompt


async def test_prompt_version_is_loaded_by_name_or_else_the_newest(store: Store) -> None:
    # Neither the version nor the time decides which one is the newest.
    await store.save_prompt("p", "pmpt_1", "9", b"nine", 3)
    await store.save_prompt("p", "pmpt_1", "10", b"ten", 3)
    await store.save_prompt("p", "pmpt_1", "1", b"one", 2)
    assert await store.load_prompt("p", "pmpt_1", "9") == StoredPrompt("9", 3, b"nine")
    assert await store.load_prompt("p", "pmpt_1", "10") == StoredPrompt("10", 3, b"ten")
    assert await store.load_prompt("p", "pmpt_1", None) == StoredPrompt("1", 2, b"one")


async def test_load_prompt_returns_none_for_an_unknown_prompt_or_version(store: Store) -> None:
    await store.save_prompt("p", "pmpt_1", "1", b"{}", 1)
    assert await store.load_prompt("p", "pmpt_1", "2") is None
    assert await store.load_prompt("p", "pmpt_1", "") is None
    assert await store.load_prompt("p", "pmpt_2", None) is None


async def test_existing_prompt_version_cannot_be_saved_again(store: Store) -> None:
    await store.save_prompt("p", "pmpt_1", "1", b"first", 1)
    with pytest.raises(InvalidRequest, match="The prompt 'pmpt_1' already has a version '1'") as refusal:
        await store.save_prompt("p", "pmpt_1", "1", b"second", 2)
    assert (refusal.value.param, refusal.value.code) == ("version", "invalid_value")
    assert await store.load_prompt("p", "pmpt_1", "1") == StoredPrompt("1", 1, b"first")


async def test_prompts_are_listed_by_id_and_then_in_saved_order(store: Store) -> None:
    for prompt_id, version, created_at in (("pmpt_b", "2", 5), ("pmpt_a", "1", 6), ("pmpt_b", "10", 7)):
        await store.save_prompt("p", prompt_id, version, b"{}", created_at)
    assert await store.list_prompts("p") == [
        PromptVersion("pmpt_a", "1", 6),
        PromptVersion("pmpt_b", "2", 5),
        PromptVersion("pmpt_b", "10", 7),
    ]


async def test_deleting_a_prompt_deletes_all_its_versions(store: Store) -> None:
    for version in ("1", "2"):
        await store.save_prompt("p", "pmpt_1", version, b"{}", 1)
    assert await store.delete_prompt("p", "pmpt_1") is True
    assert await store.delete_prompt("p", "pmpt_1") is False
    assert await store.load_prompt("p", "pmpt_1", "1") is None
    assert await store.list_prompts("p") == []


async def test_project_cannot_read_or_delete_another_projects_prompt(store: Store) -> None:
    await store.save_prompt("ours", "pmpt_1", "1", b"{}", 1)
    assert await store.load_prompt("theirs", "pmpt_1", None) is None
    assert await store.load_prompt("theirs", "pmpt_1", "1") is None
    assert await store.list_prompts("theirs") == []
    assert await store.delete_prompt("theirs", "pmpt_1") is False
    assert await store.load_prompt("ours", "pmpt_1", None) == StoredPrompt("1", 1, b"{}")
