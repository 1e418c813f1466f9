"""Conversations and their items in SQLite."""

import itertools
import sqlite3
from collections.abc import Sequence
from typing import Any

from antiphon.errors import InvalidRequest
from antiphon.offload import run_sized
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, Order
from antiphon.store.record import (
    ItemRecord,
    arrange_turn,
    measure_texts,
    unpack_items,
)
from antiphon.store.sql_conversations import ConversationWork, SqlConversations
from antiphon.store.sqlite.database import Database

CREATE = "INSERT INTO conversations (project, id, created_at, expires_at, metadata) VALUES (?, ?, ?, ?, ?)"

LOAD = """
SELECT created_at, metadata FROM conversations
WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

UPDATE = "UPDATE conversations SET metadata = ? WHERE project = ? AND id = ?"

DELETE = "DELETE FROM conversations WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

EXTEND_EXPIRY = "UPDATE conversations SET expires_at = ? WHERE project = ? AND id = ? AND expires_at < ?"

EXPIRE = "DELETE FROM conversations WHERE rowid IN (SELECT rowid FROM conversations WHERE expires_at <= ? LIMIT ?)"

# The last position that an item of the conversation has or had, and the last of all items.
LAST_POSITIONS = """
SELECT max(
    coalesce((SELECT max(place) FROM items WHERE project = ? AND conversation_id = ?), 0),
    coalesce((SELECT max(place) FROM deleted_items WHERE project = ? AND conversation_id = ?), 0)
), coalesce((SELECT max(place) FROM items), 0)
"""

APPEND = "INSERT INTO items (place, project, conversation_id, item_id, content) VALUES (?, ?, ?, ?, ?)"

BEGIN_BLOCK = "INSERT OR IGNORE INTO blocks (project, conversation_id, response_id, place) VALUES (?, ?, ?, ?)"

BLOCK_POSITION = "SELECT place FROM blocks WHERE project = ? AND conversation_id = ? AND response_id = ?"

LOAD_CONTENT = "SELECT content FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?"

# A deleted item keeps its position.
ITEM_POSITION = """
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

RECORD_DELETED = """
INSERT INTO deleted_items (project, conversation_id, place, item_id)
SELECT project, conversation_id, place, item_id FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?
"""

DELETE_ITEM = "DELETE FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?"

# The statement for a page, and the position at which a list without `after` begins.
_LARGEST_POSITION = 2**63 - 1
PAGES = {"asc": (ASCEND, 0), "desc": (DESCEND, _LARGEST_POSITION)}


class SqliteConversations(Database, SqlConversations):
    @property
    def _work(self) -> ConversationWork:
        return _WORK

    async def list_items(
        self, project: str, conversation_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        # One row more than requested shows that there are more.
        rows = await self._reader.submit(_list, (project, conversation_id, after, limit + 1, order, self._now()))
        if rows is None:
            return None
        contents = [content for (content,) in rows[:limit]]
        items = await run_sized(measure_texts(contents), unpack_items, conversation_id, contents)
        return ItemRows(items=items, has_more=len(rows) > limit)

    async def load_conversation_items(
        self, project: str, conversation_id: str, *, before: str | None = None
    ) -> list[Item | Unknown] | None:
        if before is not None:
            rows = await self._reader.submit(_list_before, (project, conversation_id, before, self._now()))
        else:  # SQLite takes a negative limit as no limit
            rows = await self._reader.submit(_list, (project, conversation_id, None, -1, "asc", self._now()))
        if rows is None:
            return None
        contents = [content for (content,) in rows]
        return await run_sized(measure_texts(contents), unpack_items, conversation_id, contents)

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
    output: list[ItemRecord] | None,
    now: float,
    expires_at: int | None,
    *,
    response_id: str | None = None,
) -> bool:
    """Append items, or with `output` a turn. Return False if there is no such conversation.

    With a `response_id`, nothing is appended if that response was appended before.
    """
    if _load(connection, project, conversation_id, now) is None:
        return False
    if expires_at is not None:
        connection.execute(EXTEND_EXPIRY, (expires_at, project, conversation_id, expires_at))
    end = _ConversationEnd(connection, project, conversation_id)
    if output is None:
        _append(end, items)
    elif response_id is None or end.begin_block(response_id):
        _append(end, arrange_turn(items, output, end.load_content))
    return True


class _ConversationEnd:
    """The end of a conversation. New items get positions after all that its items ever had."""

    def __init__(self, connection: sqlite3.Connection, project: str, conversation_id: str) -> None:
        self._connection = connection
        self.conversation = project, conversation_id
        self._last, newest = connection.execute(LAST_POSITIONS, self.conversation * 2).fetchone()
        self._positions = itertools.count(max(self._last, newest) + 1)

    def begin_block(self, response_id: str) -> bool:
        """Record that the items of a response begin here. Return False if they were appended before."""
        return self._connection.execute(BEGIN_BLOCK, (*self.conversation, response_id, self._last)).rowcount > 0

    def add(self, item: ItemRecord) -> bool:
        """Append an item. Return False if the conversation has an item of this id."""
        try:
            self._connection.execute(APPEND, (next(self._positions), *self.conversation, *item))
        except sqlite3.IntegrityError:
            return False
        return True

    def load_content(self, item_id: str) -> bytes | None:
        row = self._connection.execute(LOAD_CONTENT, (*self.conversation, item_id)).fetchone()
        return None if row is None else row[0]


def _append(end: _ConversationEnd, items: list[ItemRecord]) -> None:
    for item in items:
        if not end.add(item):
            raise InvalidRequest(
                f"The conversation '{end.conversation[1]}' already has an item with id '{item.id}'.",
                param="items",
                code="invalid_value",
            )


def _load(connection: sqlite3.Connection, project: str, conversation_id: str, now: float) -> Any:
    return connection.execute(LOAD, (project, conversation_id, now)).fetchone()


def _create(connection: sqlite3.Connection, row: Sequence[Any], items: list[ItemRecord]) -> None:
    connection.execute(CREATE, row)
    _append(_ConversationEnd(connection, row[0], row[1]), items)


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
    statement, position = PAGES[order]
    if after is not None:
        (position,) = connection.execute(ITEM_POSITION, (project, conversation_id, after) * 2).fetchone()
        if position is None:
            raise InvalidRequest(
                f"The conversation has no item with id '{after}' to continue after.",
                param="after",
                code="invalid_value",
            )
    return connection.execute(statement, (project, conversation_id, position, limit)).fetchall()


def _list_before(
    connection: sqlite3.Connection, project: str, conversation_id: str, response_id: str, now: float
) -> list[Any] | None:
    if _load(connection, project, conversation_id, now) is None:
        return None
    row = connection.execute(BLOCK_POSITION, (project, conversation_id, response_id)).fetchone()
    (position,) = row or (_LARGEST_POSITION,)
    return connection.execute(BEFORE, (project, conversation_id, position)).fetchall()


def _delete_item(connection: sqlite3.Connection, project: str, conversation_id: str, item_id: str, now: float) -> bool:
    if _load(connection, project, conversation_id, now) is None:
        return False
    if connection.execute(RECORD_DELETED, (project, conversation_id, item_id)).rowcount == 0:
        return False
    connection.execute(DELETE_ITEM, (project, conversation_id, item_id))
    return True


_WORK = ConversationWork(create=_create, load=LOAD, update=_update, delete=DELETE, append=append_block)
