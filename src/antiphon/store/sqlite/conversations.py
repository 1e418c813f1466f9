"""Conversations and their items in SQLite."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from antiphon.errors import InvalidRequest
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.store.base import ItemRows, Order
from antiphon.store.record import ItemRecord, pack_items, pack_metadata, unpack_conversation, unpack_items
from antiphon.store.sqlite.database import Database

CREATE = "INSERT INTO conversations (project, id, created_at, expires_at, metadata) VALUES (?, ?, ?, ?, ?)"

LOAD = """
SELECT created_at, metadata FROM conversations
WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

UPDATE = "UPDATE conversations SET metadata = ? WHERE project = ? AND id = ?"

DELETE = "DELETE FROM conversations WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

PROLONG = "UPDATE conversations SET expires_at = ? WHERE project = ? AND id = ? AND expires_at < ?"

EXPIRE = "DELETE FROM conversations WHERE rowid IN (SELECT rowid FROM conversations WHERE expires_at <= ? LIMIT ?)"

APPEND = "INSERT INTO items (project, conversation_id, item_id, content) VALUES (?, ?, ?, ?)"

PLACE = "SELECT place FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?"

ASCEND = """
SELECT content FROM items WHERE project = ? AND conversation_id = ? AND place > ? ORDER BY place LIMIT ?
"""

DESCEND = """
SELECT content FROM items WHERE project = ? AND conversation_id = ? AND place < ? ORDER BY place DESC LIMIT ?
"""

LOAD_ITEM = """
SELECT content FROM items JOIN conversations
    ON conversations.project = items.project AND conversations.id = items.conversation_id
WHERE items.project = ? AND conversation_id = ? AND item_id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

DELETE_ITEM = "DELETE FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?"

# Where a list without `after` begins, in each order: before all places, and behind them.
PAGES = {"asc": (ASCEND, 0), "desc": (DESCEND, 2**63 - 1)}


class Conversations(Database):
    async def create_conversation(
        self,
        project: str,
        conversation: Conversation,
        items: Sequence[Item | Unknown],
        *,
        expires_at: int | None = None,
    ) -> None:
        metadata = pack_metadata(conversation.metadata)
        row = (project, conversation.id, conversation.created_at, expires_at, metadata)
        await self._writer.submit(_create, (row, pack_items(items)))

    async def load_conversation(self, project: str, conversation_id: str) -> Conversation | None:
        rows = await self._reader.submit(LOAD, (project, conversation_id, self._now()))
        return unpack_conversation(conversation_id, *rows[0]) if rows else None

    async def update_conversation(
        self, project: str, conversation_id: str, metadata: dict[str, str] | None
    ) -> Conversation | None:
        packed = pack_metadata(metadata)
        row = await self._writer.submit(_update, (project, conversation_id, packed, self._now()))
        return None if row is None else unpack_conversation(conversation_id, row[0], packed)

    async def delete_conversation(self, project: str, conversation_id: str) -> bool:
        deleted: int = await self._writer.submit(DELETE, (project, conversation_id, self._now()))
        return deleted > 0

    async def append_items(
        self,
        project: str,
        conversation_id: str,
        items: Sequence[Item | Unknown],
        *,
        expires_at: int | None = None,
    ) -> bool:
        appended: bool = await self._writer.submit(
            append_block, (project, conversation_id, pack_items(items), self._now(), expires_at)
        )
        return appended

    async def list_items(
        self, project: str, conversation_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        # One more than asked for tells whether there are more.
        rows = await self._reader.submit(_list, (project, conversation_id, after, limit + 1, order, self._now()))
        if rows is None:
            return None
        items = unpack_items(conversation_id, (content for (content,) in rows[:limit]))
        return ItemRows(items=items, has_more=len(rows) > limit)

    async def conversation_items(self, project: str, conversation_id: str) -> list[Item | Unknown] | None:
        # To SQLite, a negative limit is none.
        rows = await self._reader.submit(_list, (project, conversation_id, None, -1, "asc", self._now()))
        return None if rows is None else unpack_items(conversation_id, (content for (content,) in rows))

    async def load_item(self, project: str, conversation_id: str, item_id: str) -> Item | Unknown | None:
        rows = await self._reader.submit(LOAD_ITEM, (project, conversation_id, item_id, self._now()))
        return unpack_items(conversation_id, rows[0])[0] if rows else None

    async def delete_item(self, project: str, conversation_id: str, item_id: str) -> bool:
        deleted: bool = await self._writer.submit(_delete_item, (project, conversation_id, item_id, self._now()))
        return deleted


def append_block(
    connection: sqlite3.Connection,
    project: str,
    conversation_id: str,
    items: list[ItemRecord],
    now: float,
    expires_at: int | None,
    *,
    param: str = "items",
) -> bool:
    """Append items in one go. We hold the only right to write, so nobody's come in between."""
    if _load(connection, project, conversation_id, now) is None:
        return False
    _append(connection, project, conversation_id, items, param=param)
    if expires_at is not None:
        connection.execute(PROLONG, (expires_at, project, conversation_id, expires_at))
    return True


def _append(
    connection: sqlite3.Connection, project: str, conversation_id: str, items: list[ItemRecord], *, param: str
) -> None:
    for item in items:
        try:
            connection.execute(APPEND, (project, conversation_id, *item))
        except sqlite3.IntegrityError:  # whoever asked is told; it is nothing for the log
            raise InvalidRequest(
                f"The conversation '{conversation_id}' already has an item with id '{item.id}'.", param=param
            ) from None


def _load(connection: sqlite3.Connection, project: str, conversation_id: str, now: float) -> Any:
    return connection.execute(LOAD, (project, conversation_id, now)).fetchone()


def _create(connection: sqlite3.Connection, row: Sequence[Any], items: list[ItemRecord]) -> None:
    connection.execute(CREATE, row)
    _append(connection, row[0], row[1], items, param="items")


def _update(connection: sqlite3.Connection, project: str, conversation_id: str, metadata: bytes, now: float) -> Any:
    row = _load(connection, project, conversation_id, now)
    if row is not None:
        connection.execute(UPDATE, (metadata, project, conversation_id))
    return row


def _list(
    connection: sqlite3.Connection,
    project: str,
    conversation_id: str,
    after: str | None,
    limit: int,
    order: Order,
    now: float,
) -> list[Any] | None:
    if _load(connection, project, conversation_id, now) is None:
        return None
    statement, place = PAGES[order]
    if after is not None:
        row = connection.execute(PLACE, (project, conversation_id, after)).fetchone()
        if row is None:
            raise InvalidRequest(f"The conversation has no item with id '{after}' to continue after.", param="after")
        (place,) = row
    return connection.execute(statement, (project, conversation_id, place, limit)).fetchall()


def _delete_item(connection: sqlite3.Connection, project: str, conversation_id: str, item_id: str, now: float) -> bool:
    if _load(connection, project, conversation_id, now) is None:
        return False
    return connection.execute(DELETE_ITEM, (project, conversation_id, item_id)).rowcount > 0
