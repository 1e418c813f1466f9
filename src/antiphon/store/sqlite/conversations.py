"""Conversations and their items in SQLite."""

import itertools
import sqlite3
from collections.abc import Sequence
from typing import Any

from antiphon.errors import InvalidRequest
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, Order
from antiphon.store.record import ItemRecord, pack_items, pack_metadata, rename_item, unpack_conversation, unpack_items
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

# The last place that a conversation's items have or had, and the last of all that there are.
END = """
SELECT max(
    coalesce((SELECT max(place) FROM items WHERE project = ? AND conversation_id = ?), 0),
    coalesce((SELECT max(place) FROM deleted_items WHERE project = ? AND conversation_id = ?), 0)
), coalesce((SELECT max(place) FROM items), 0)
"""

APPEND = "INSERT INTO items (place, project, conversation_id, item_id, content) VALUES (?, ?, ?, ?, ?)"

BEGIN_BLOCK = "INSERT OR IGNORE INTO blocks (project, conversation_id, response_id, place) VALUES (?, ?, ?, ?)"

BLOCK = "SELECT place FROM blocks WHERE project = ? AND conversation_id = ? AND response_id = ?"

HELD = "SELECT content FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?"

# Of an item that was deleted, the place that it had.
PLACE = """
SELECT coalesce(
    (SELECT place FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?),
    (SELECT max(place) FROM deleted_items WHERE project = ? AND conversation_id = ? AND item_id = ?)
)
"""

ASCEND = """
SELECT content FROM items WHERE project = ? AND conversation_id = ? AND place > ? ORDER BY place LIMIT ?
"""

DESCEND = """
SELECT content FROM items WHERE project = ? AND conversation_id = ? AND place < ? ORDER BY place DESC LIMIT ?
"""

BEFORE = "SELECT content FROM items WHERE project = ? AND conversation_id = ? AND place <= ? ORDER BY place"

LOAD_ITEM = """
SELECT content FROM items JOIN conversations
    ON conversations.project = items.project AND conversations.id = items.conversation_id
WHERE items.project = ? AND conversation_id = ? AND item_id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

NOTE_DELETED = """
INSERT INTO deleted_items (project, conversation_id, place, item_id)
SELECT project, conversation_id, place, item_id FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?
"""

DELETE_ITEM = "DELETE FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?"

# Where a list without `after` begins, in each order: before all places, and behind them.
_LAST_PLACE = 2**63 - 1
PAGES = {"asc": (ASCEND, 0), "desc": (DESCEND, _LAST_PLACE)}


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
        answer: Sequence[Item | Unknown] | None = None,
        expires_at: int | None = None,
    ) -> bool:
        packed = pack_items(items), None if answer is None else pack_items(answer)
        appended: bool = await self._writer.submit(
            append_block, (project, conversation_id, *packed, self._now(), expires_at)
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

    async def conversation_items(
        self, project: str, conversation_id: str, *, before: str | None = None
    ) -> list[Item | Unknown] | None:
        if before is not None:
            rows = await self._reader.submit(_list_before, (project, conversation_id, before, self._now()))
        else:  # to SQLite, a negative limit is none
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
    answer: list[ItemRecord] | None,
    now: float,
    expires_at: int | None,
    *,
    response_id: str | None = None,
) -> bool:
    """Append items in one go, or a response, once. We hold the only right to write, so nobody's come in between."""
    if _load(connection, project, conversation_id, now) is None:
        return False
    if expires_at is not None:
        connection.execute(PROLONG, (expires_at, project, conversation_id, expires_at))
    end = _End(connection, project, conversation_id)
    if answer is None:
        _append(end, items)
    elif response_id is None or end.begin_block(response_id):
        _append_turn(end, items, answer)
    return True


class _End:
    """The end of a conversation. What is added gets places behind all that its items ever had."""

    def __init__(self, connection: sqlite3.Connection, project: str, conversation_id: str) -> None:
        self._connection = connection
        self.conversation = project, conversation_id
        self._last, newest = connection.execute(END, self.conversation * 2).fetchone()
        self._places = itertools.count(max(self._last, newest) + 1)

    def begin_block(self, response_id: str) -> bool:
        """Note that what comes now is this response's. False if that has come before."""
        return self._connection.execute(BEGIN_BLOCK, (*self.conversation, response_id, self._last)).rowcount > 0

    def add(self, item: ItemRecord) -> bool:
        """False if the conversation has an item of this id."""
        try:
            self._connection.execute(APPEND, (next(self._places), *self.conversation, *item))
        except sqlite3.IntegrityError:
            return False
        return True

    def find(self, item_id: str | None) -> bytes | None:
        """The content of the item with this id."""
        row = self._connection.execute(HELD, (*self.conversation, item_id)).fetchone()
        return None if row is None else row[0]


def _append(end: _End, items: list[ItemRecord]) -> None:
    for item in items:
        if not end.add(item):
            raise InvalidRequest(
                f"The conversation '{end.conversation[1]}' already has an item with id '{item.id}'.",
                param="items",
                code="invalid_value",
            )


def _append_turn(end: _End, asked: list[ItemRecord], answer: list[ItemRecord]) -> None:
    for item in asked:
        if not end.add(item) and end.find(item.id) != item.content:
            end.add(rename_item(item, end.find))
    for item in answer:
        if not end.add(item):
            end.add(rename_item(item, end.find))


def _load(connection: sqlite3.Connection, project: str, conversation_id: str, now: float) -> Any:
    return connection.execute(LOAD, (project, conversation_id, now)).fetchone()


def _create(connection: sqlite3.Connection, row: Sequence[Any], items: list[ItemRecord]) -> None:
    connection.execute(CREATE, row)
    _append(_End(connection, row[0], row[1]), items)


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
        (place,) = connection.execute(PLACE, (project, conversation_id, after) * 2).fetchone()
        if place is None:
            raise InvalidRequest(
                f"The conversation has no item with id '{after}' to continue after.",
                param="after",
                code="invalid_value",
            )
    return connection.execute(statement, (project, conversation_id, place, limit)).fetchall()


def _list_before(
    connection: sqlite3.Connection, project: str, conversation_id: str, response_id: str, now: float
) -> list[Any] | None:
    if _load(connection, project, conversation_id, now) is None:
        return None
    row = connection.execute(BLOCK, (project, conversation_id, response_id)).fetchone()
    (place,) = row or (_LAST_PLACE,)
    return connection.execute(BEFORE, (project, conversation_id, place)).fetchall()


def _delete_item(connection: sqlite3.Connection, project: str, conversation_id: str, item_id: str, now: float) -> bool:
    if _load(connection, project, conversation_id, now) is None:
        return False
    if connection.execute(NOTE_DELETED, (project, conversation_id, item_id)).rowcount == 0:
        return False
    connection.execute(DELETE_ITEM, (project, conversation_id, item_id))
    return True
