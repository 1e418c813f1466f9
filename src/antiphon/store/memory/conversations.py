"""Conversations and their items in memory."""

from collections.abc import Sequence

from antiphon.errors import InvalidRequest, ServerError
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.store.base import ItemRows, Order
from antiphon.store.memory.tables import ConversationRow, Memory
from antiphon.store.record import ItemRecord, pack_items, pack_metadata, unpack_conversation, unpack_items


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
        self._append(conversation.id, row, pack_items(items), param="items")
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
        expires_at: int | None = None,
    ) -> bool:
        row = self._find_conversation(project, conversation_id)
        if row is None:
            return False
        self._append(conversation_id, row, pack_items(items), param="items")
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
        places = list(row.items) if order == "asc" else list(reversed(row.items))
        start = 0
        if after is not None:
            if after not in row.places:
                raise InvalidRequest(
                    f"The conversation has no item with id '{after}' to continue after.", param="after"
                )
            start = places.index(row.places[after]) + 1
        page = [row.items[place].content for place in places[start : start + limit]]
        return ItemRows(items=unpack_items(conversation_id, page), has_more=start + limit < len(places))

    async def conversation_items(self, project: str, conversation_id: str) -> list[Item | Unknown] | None:
        row = self._find_conversation(project, conversation_id)
        return None if row is None else unpack_items(conversation_id, (item.content for item in row.items.values()))

    async def load_item(self, project: str, conversation_id: str, item_id: str) -> Item | Unknown | None:
        row = self._find_conversation(project, conversation_id)
        if row is None or item_id not in row.places:
            return None
        return unpack_items(conversation_id, [row.items[row.places[item_id]].content])[0]

    async def delete_item(self, project: str, conversation_id: str, item_id: str) -> bool:
        row = self._find_conversation(project, conversation_id)
        if row is None or item_id not in row.places:
            return False
        del row.items[row.places.pop(item_id)]
        return True

    def _find_conversation(self, project: str, conversation_id: str) -> ConversationRow | None:
        row = self._tables.conversations.get((project, conversation_id))
        return row if row is not None and self._is_live(row) else None

    def _append(self, conversation_id: str, row: ConversationRow, items: list[ItemRecord], *, param: str) -> None:
        known = set(row.places)
        for item in items:
            if item.id in known:
                raise InvalidRequest(
                    f"The conversation '{conversation_id}' already has an item with id '{item.id}'.", param=param
                )
            if item.id is not None:
                known.add(item.id)
        for item in items:
            place = next(self._tables.places)
            row.items[place] = item
            if item.id is not None:
                row.places[item.id] = place
