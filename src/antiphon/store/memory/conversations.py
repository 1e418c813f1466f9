"""Conversations and their items in memory."""

import math
from collections.abc import Sequence

from antiphon.errors import InvalidRequest, ServerError
from antiphon.offload import run_sized
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, Order
from antiphon.store.history_budget import HistoryShare, decode_history
from antiphon.store.memory.tables import ConversationRow, MemoryTables
from antiphon.store.object_limits import check_number
from antiphon.store.record import (
    ItemRecord,
    fit_page,
    measure_texts,
    pack_items,
    pack_metadata,
    rename_item,
    unpack_conversation,
    unpack_items,
)


class MemoryConversations(MemoryTables):
    async def create_conversation(
        self,
        project: str,
        conversation: Conversation,
        items: Sequence[Item | Unknown],
        *,
        expires_at: int | None = None,
    ) -> None:
        number = sum(owner == project for owner, _ in self._tables.conversations)
        check_number(number, self._limits.max_conversations, "conversations", setting="max_conversations")
        metadata = pack_metadata(conversation.metadata)
        row = ConversationRow(created_at=conversation.created_at, metadata=metadata, expires_at=expires_at)
        self._append(conversation.id, row, pack_items(items))
        key = project, conversation.id
        if key in self._tables.conversations:
            raise ServerError(f"The store already has a conversation {conversation.id}.")
        self._tables.conversations[key] = row

    async def load_conversation(self, project: str, conversation_id: str) -> Conversation | None:
        row = self._find_conversation(project, conversation_id)
        return None if row is None else unpack_conversation(conversation_id, row.created_at, row.metadata)

    async def update_conversation(
        self, project: str, conversation_id: str, metadata: dict[str, str] | None
    ) -> Conversation | None:
        row = self._find_conversation(project, conversation_id)
        if row is None:
            return None
        row.metadata = pack_metadata(metadata)
        return unpack_conversation(conversation_id, row.created_at, row.metadata)

    async def delete_conversation(self, project: str, conversation_id: str) -> bool:
        if self._find_conversation(project, conversation_id) is None:
            return False
        del self._tables.conversations[project, conversation_id]
        return True

    async def append_items(
        self,
        project: str,
        conversation_id: str,
        items: Sequence[Item | Unknown],
        *,
        answer: Sequence[Item | Unknown] | None = None,
        expires_at: int | None = None,
    ) -> bool:
        row = self._find_conversation(project, conversation_id)
        if row is None:
            return False
        if answer is None:
            self._append(conversation_id, row, pack_items(items))
        else:
            self._append_turn(row, pack_items(items), pack_items(answer))
        self._extend_expiry(row, expires_at)
        return True

    async def list_items(
        self, project: str, conversation_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        row = self._find_conversation(project, conversation_id)
        if row is None:
            return None
        positions = list(row.items)
        if after is not None:
            start = row.positions.get(after, row.deleted.get(after))
            if start is None:
                raise InvalidRequest(
                    f"The conversation has no item with id '{after}' to continue after.",
                    param="after",
                    code="invalid_value",
                )
            positions = [each for each in positions if (each > start if order == "asc" else each < start)]
        if order == "desc":
            positions.reverse()
        count, has_more = fit_page((len(row.items[position].content) for position in positions), limit)
        page = [row.items[position].content for position in positions[:count]]
        items = await run_sized(measure_texts(page), unpack_items, conversation_id, page)
        return ItemRows(items=items, has_more=has_more)

    async def load_conversation_items(
        self, project: str, conversation_id: str, *, before: str | None = None, share: HistoryShare | None = None
    ) -> list[Item | Unknown] | None:
        row = self._find_conversation(project, conversation_id)
        if row is None:
            return None
        end = row.blocks.get(before, math.inf) if before is not None else math.inf
        contents = [item.content for position, item in row.items.items() if position < end]
        if share is not None:
            await share.reserve(measure_texts(contents))
        return await decode_history(conversation_id, contents, share)

    async def load_item(self, project: str, conversation_id: str, item_id: str) -> Item | Unknown | None:
        row = self._find_conversation(project, conversation_id)
        if row is None or item_id not in row.positions:
            return None
        return unpack_items(conversation_id, [row.items[row.positions[item_id]].content])[0]

    async def delete_item(self, project: str, conversation_id: str, item_id: str) -> bool:
        row = self._find_conversation(project, conversation_id)
        if row is None or item_id not in row.positions:
            return False
        row.deleted[item_id] = position = row.positions.pop(item_id)
        del row.items[position]
        return True

    def _find_conversation(self, project: str, conversation_id: str) -> ConversationRow | None:
        row = self._tables.conversations.get((project, conversation_id))
        return row if row is not None and self._is_live(row) else None

    def _extend_expiry(self, row: ConversationRow, expires_at: int | None) -> None:
        if expires_at is not None and row.expires_at is not None:
            row.expires_at = max(row.expires_at, expires_at)

    def _append(self, conversation_id: str, row: ConversationRow, items: list[ItemRecord]) -> None:
        known = set(row.positions)
        for item in items:
            if item.id in known:
                raise InvalidRequest(
                    f"The conversation '{conversation_id}' already has an item with id '{item.id}'.",
                    param="items",
                    code="invalid_value",
                )
            if item.id is not None:
                known.add(item.id)
        for item in items:
            self._add(row, item)

    def _append_block(
        self, row: ConversationRow, response_id: str, input_items: list[ItemRecord], output_items: list[ItemRecord]
    ) -> None:
        """Append the items of a response, unless they were appended before."""
        if response_id not in row.blocks:
            row.blocks[response_id] = next(self._tables.next_positions)
            self._append_turn(row, input_items, output_items)

    def _append_turn(self, row: ConversationRow, input_items: list[ItemRecord], output_items: list[ItemRecord]) -> None:
        for item in input_items:
            if item.id not in row.positions or row.items[row.positions[item.id]] != item:
                self._add(row, item)
        for item in output_items:
            self._add(row, item)

    def _add(self, row: ConversationRow, item: ItemRecord) -> None:
        if item.id in row.positions:
            item = rename_item(item, row.positions.__contains__)
        position = next(self._tables.next_positions)
        row.items[position] = item
        if item.id is not None:
            row.positions[item.id] = position
