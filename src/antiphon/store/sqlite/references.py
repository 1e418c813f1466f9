"""What a reference to an item finds, in SQLite."""

import sqlite3
from collections.abc import Iterable, Sequence

from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.record import Foreign, pick_item, unpack_items, unpack_output
from antiphon.store.sqlite.database import Database

# What was made in a response that is kept is found there, and goes with it.
NOTE = """
INSERT OR IGNORE INTO foreign_items (project, response_id, item_id) SELECT ?, ?, ?
WHERE NOT EXISTS (SELECT 1 FROM responses WHERE project = ? AND id = ?)
"""

OUTPUT = "SELECT output FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

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
    async def load_outputs(self, project: str, response_ids: Sequence[str]) -> list[Item | Unknown]:
        outputs: list[tuple[str, bytes]] = await self._reader.submit(
            _read_outputs, (project, response_ids, self._now())
        )
        return [item for output in outputs for item in unpack_output(*output)]

    async def find_item(self, project: str, item_id: str) -> Item | Unknown | None:
        wanted = (project, item_id, self._now())
        held = await self._reader.submit(FIND_IN_RESPONSE, wanted)
        if held:
            return pick_item(item_id, *held[0])
        rows = await self._reader.submit(FIND_IN_CONVERSATION, wanted)
        return unpack_items(rows[0][0], rows[0][1:])[0] if rows else None


def _read_outputs(
    connection: sqlite3.Connection, project: str, response_ids: Sequence[str], now: float
) -> list[tuple[str, bytes]]:
    found = ((each, connection.execute(OUTPUT, (project, each, now)).fetchone()) for each in response_ids)
    return [(response_id, row[0]) for response_id, row in found if row is not None]


def note_items(connection: sqlite3.Connection, project: str, response_id: str, foreign: Iterable[Foreign]) -> None:
    """Note the foreign items of a response that has just been written."""
    connection.executemany(NOTE, ((project, response_id, each.item_id, project, each.owner) for each in foreign))
