"""What a reference to an item finds, in SQLite."""

import sqlite3
from collections.abc import Iterable

from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.store.record import pick_item, unpack_items
from antiphon.store.sqlite.database import Database

NOTE = "INSERT OR IGNORE INTO foreign_items (project, response_id, item_id) VALUES (?, ?, ?)"

FIND_IN_RESPONSE = """
SELECT id, input, output FROM responses WHERE rowid = (
    SELECT max(responses.rowid) FROM foreign_items JOIN responses
        ON responses.project = foreign_items.project AND responses.id = response_id
    WHERE foreign_items.project = ? AND item_id = ? AND (expires_at IS NULL OR expires_at > ?)
)
"""

FIND_IN_CONVERSATION = """
SELECT conversation_id, content FROM items WHERE place = (
    SELECT max(place) FROM items JOIN conversations
        ON conversations.project = items.project AND conversations.id = items.conversation_id
    WHERE items.project = ? AND item_id = ? AND (expires_at IS NULL OR expires_at > ?)
)
"""


class References(Database):
    async def find_item(self, project: str, item_id: str) -> Item | Unknown | None:
        wanted = (project, item_id, self._now())
        held = await self._reader.submit(FIND_IN_RESPONSE, wanted)
        if held:
            return pick_item(item_id, *held[0])
        rows = await self._reader.submit(FIND_IN_CONVERSATION, wanted)
        return unpack_items(rows[0][0], rows[0][1:])[0] if rows else None


def note_items(connection: sqlite3.Connection, project: str, response_id: str, foreign: Iterable[str]) -> None:
    """Note the foreign items of a response that has just been written."""
    connection.executemany(NOTE, ((project, response_id, item_id) for item_id in foreign))
