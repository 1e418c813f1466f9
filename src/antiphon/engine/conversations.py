"""Conversations: create, read, update and delete them and their items."""

import time
from collections.abc import Sequence
from typing import Literal

from antiphon import offload
from antiphon.engine.expiry import compute_expiry
from antiphon.engine.items import ItemPage, check_item_ids, make_page, normalize_item
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.counts import check_parts
from antiphon.engine.prepare.parameters import check_configuration_updates
from antiphon.engine.prepare.references import load_referenced_items
from antiphon.engine.prepare.unknown_types import check_unknown_types
from antiphon.engine.respond.ids import Mint
from antiphon.engine.storage_quota import StorageQuota
from antiphon.errors import NotFound
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store
from antiphon.store.history_budget import HistoryBudget, HistoryShare


class Conversations:
    def __init__(
        self,
        store: Store,
        policy: Policy,
        quota: StorageQuota | None = None,
        histories: HistoryBudget | None = None,
    ) -> None:
        self._store = store
        self._histories = histories or HistoryBudget()
        self.policy = policy
        self.quota = quota

    async def create(
        self, project: str, items: Sequence[Item | Unknown], metadata: dict[str, str] | None
    ) -> Conversation:
        mint = Mint()
        conversation = Conversation(f"conv_{mint.token}", int(time.time()), metadata or {})
        expires_at = compute_expiry(self.policy)
        with self._histories.open(project) as share:
            stored = await self._prepare_items(project, items, mint, share)
            await self._store.create_conversation(project, conversation, stored, expires_at=expires_at)
        return conversation

    async def retrieve(self, project: str, conversation_id: str) -> Conversation:
        return _require(await self._store.load_conversation(project, conversation_id), conversation_id)

    async def update(self, project: str, conversation_id: str, metadata: dict[str, str] | None) -> Conversation:
        updated = await self._store.update_conversation(project, conversation_id, metadata or {})
        return _require(updated, conversation_id)

    async def delete(self, project: str, conversation_id: str) -> None:
        if not await self._store.delete_conversation(project, conversation_id):
            raise _not_found(conversation_id)

    async def add_items(self, project: str, conversation_id: str, items: Sequence[Item | Unknown]) -> ItemPage:
        expires_at = compute_expiry(self.policy)
        with self._histories.open(project) as share:
            stored = await self._prepare_items(project, items, Mint(), share)
            if not await self._store.append_items(project, conversation_id, stored, expires_at=expires_at):
                raise _not_found(conversation_id)
        return make_page(stored, has_more=False)

    async def _prepare_items(
        self, project: str, items: Sequence[Item | Unknown], mint: Mint, share: HistoryShare
    ) -> list[Item | Unknown]:
        """Check the items, give them ids, and replace references by the stored items."""
        if self.quota is not None:
            await self.quota.check(project)
        check_item_ids(items, param="items")
        check_parts(items, self.policy, param="items")
        check_unknown_types(items, param="items", is_forwarded=True)
        check_configuration_updates(items, param="items")
        loaded = await load_referenced_items(items, project=project, store=self._store, param="items", share=share)
        return await offload.run(
            lambda: [loaded.get(index) or normalize_item(item, mint) for index, item in enumerate(items)]
        )

    async def list_items(
        self, project: str, conversation_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> ItemPage:
        rows = await self._store.list_items(project, conversation_id, after=after, limit=limit, order=order)
        if rows is None:
            raise _not_found(conversation_id)
        return make_page(rows.items, has_more=rows.has_more)

    async def retrieve_item(self, project: str, conversation_id: str, item_id: str) -> Item | Unknown:
        item = await self._store.load_item(project, conversation_id, item_id)
        if item is None:
            raise NotFound(f"Item with id '{item_id}' not found in this conversation.", param="item_id")
        return item

    async def delete_item(self, project: str, conversation_id: str, item_id: str) -> Conversation:
        """Delete the item and return its conversation."""
        conversation = await self.retrieve(project, conversation_id)
        if not await self._store.delete_item(project, conversation_id, item_id):
            raise NotFound(f"Item with id '{item_id}' not found in this conversation.", param="item_id")
        return conversation


def _require(conversation: Conversation | None, conversation_id: str) -> Conversation:
    if conversation is None:
        raise _not_found(conversation_id)
    return conversation


def _not_found(conversation_id: str) -> NotFound:
    return NotFound(f"Conversation with id '{conversation_id}' not found.", param="conversation_id")
