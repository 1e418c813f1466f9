"""Conversations and their items in memory."""

import math
from collections.abc import Sequence

from antiphon.errors import InvalidRequest, ServerError
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, Order
from antiphon.store.memory.tables import ConversationRow, Memory
from antiphon.store.record import ItemRecord, pack_items, pack_metadata, rename_item, unpack_conversation, unpack_items


class Conversations(Memory):
    async def create_conversation(
        self,
        project: str,
        conversation: Conversation,
        items: Sequence[Item | Unknown],
        *,
        expires_at: int | None = None,
    ) -> None:
        key = project, conversation.id
        if key in self._tables.conversations:
            raise ServerError(f"The store already has a conversation {conversation.id}.")
        metadata = pack_metadata(conversation.metadata)
        row = ConversationRow(created_at=conversation.created_at, metadata=metadata, expires_at=expires_at)
        self._append(conversation.id, row, pack_items(items))
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
        self._prolong(row, expires_at)
        return True

    def _prolong(self, row: ConversationRow, expires_at: int | None) -> None:
        if expires_at is not None and row.expires_at is not None:
            row.expires_at = max(row.expires_at, expires_at)

    async def list_items(
        self, project: str, conversation_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        row = self._find_conversation(project, conversation_id)
        if row is None:
            return None
        places = list(row.items)
        if after is not None:
            start = row.places.get(after, row.deleted.get(after))
            if start is None:
                raise InvalidRequest(
                    f"The conversation has no item with id '{after}' to continue after.",
                    param="after",
                    code="invalid_value",
                )
            places = [place for place in places if (place > start if order == "asc" else place < start)]
        if order == "desc":
            places.reverse()
        page = [row.items[place].content for place in places[:limit]]
        return ItemRows(items=unpack_items(conversation_id, page), has_more=limit < len(places))

    async def conversation_items(
        self, project: str, conversation_id: str, *, before: str | None = None
    ) -> list[Item | Unknown] | None:
        row = self._find_conversation(project, conversation_id)
        if row is None:
            return None
        end = row.blocks.get(before, math.inf) if before is not None else math.inf
        return unpack_items(conversation_id, (item.content for place, item in row.items.items() if place < end))

    async def load_item(self, project: str, conversation_id: str, item_id: str) -> Item | Unknown | None:
        row = self._find_conversation(project, conversation_id)
        if row is None or item_id not in row.places:
            return None
        return unpack_items(conversation_id, [row.items[row.places[item_id]].content])[0]

    async def delete_item(self, project: str, conversation_id: str, item_id: str) -> bool:
        row = self._find_conversation(project, conversation_id)
        if row is None or item_id not in row.places:
            return False
        row.deleted[item_id] = place = row.places.pop(item_id)
        del row.items[place]
        return True

    def _find_conversation(self, project: str, conversation_id: str) -> ConversationRow | None:
        row = self._tables.conversations.get((project, conversation_id))
        return row if row is not None and self._is_live(row) else None

    def _append(self, conversation_id: str, row: ConversationRow, items: list[ItemRecord]) -> None:
        known = set(row.places)
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
        self, row: ConversationRow, response_id: str, asked: list[ItemRecord], answer: list[ItemRecord]
    ) -> None:
        """Append a response, once."""
        if response_id not in row.blocks:
            row.blocks[response_id] = next(self._tables.places)
            self._append_turn(row, asked, answer)

    def _append_turn(self, row: ConversationRow, asked: list[ItemRecord], answer: list[ItemRecord]) -> None:
        for item in asked:
            if item.id not in row.places or row.items[row.places[item.id]] != item:
                self._add(row, item)
        for item in answer:
            self._add(row, item)

    def _add(self, row: ConversationRow, item: ItemRecord) -> None:
        if item.id in row.places:
            item = rename_item(item, row.places.__contains__)
        place = next(self._tables.places)
        row.items[place] = item
        if item.id is not None:
            row.places[item.id] = place
