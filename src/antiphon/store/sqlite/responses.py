"""Responses in SQLite. The schema itself sees to it that a final response has no run, and a deleted one no events."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from antiphon.errors import NotFound
from antiphon.store.base import LeaseLost, Link, StoredResponse
from antiphon.store.record import (
    Batch,
    Foreign,
    ItemRecord,
    LinkRecord,
    find_foreign,
    pack,
    pack_events,
    pack_items,
    unpack,
    walk,
)
from antiphon.store.sqlite.conversations import EXPIRE as EXPIRE_CONVERSATIONS
from antiphon.store.sqlite.conversations import append_block
from antiphon.store.sqlite.database import Database
from antiphon.store.sqlite.events import append_batch
from antiphon.store.sqlite.leases import is_held
from antiphon.store.sqlite.references import note_items

# How many expired responses, or conversations, go in one step: a writer that waits meanwhile hardly notices.
EXPIRY_STEP = 100

INSERT = """
INSERT INTO responses (project, id, previous_response_id, created_at, final, expires_at, input, output, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

SAVE = f"""
{INSERT}
ON CONFLICT (project, id) DO UPDATE SET
    previous_response_id = excluded.previous_response_id,
    created_at = excluded.created_at,
    final = excluded.final,
    expires_at = excluded.expires_at,
    input = excluded.input,
    output = excluded.output,
    body = excluded.body
WHERE excluded.final >= responses.final
"""

LOAD = """
SELECT expires_at, input, output, body FROM responses
WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

DELETE = "DELETE FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

# Only the head must not have expired. The walk itself carries only keys. UNION, not UNION ALL: a row that comes again
# ends the walk. The order of the rows is not defined, so the reader puts them in order. Of the oldest alone the body is
# read: only a response that continues none can belong to a conversation.
CHAIN = """
WITH RECURSIVE walked (project, id, previous, place) AS (
    SELECT project, id, previous_response_id, rowid FROM responses
    WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
    UNION
    SELECT older.project, older.id, older.previous_response_id, older.rowid
    FROM walked JOIN responses AS older ON older.project = walked.project AND older.id = walked.previous
)
SELECT walked.id, previous, final, input, output, CASE WHEN previous IS NULL THEN body END
FROM walked JOIN responses ON responses.rowid = place
"""

# The last of a chain first: then those before it are continued by nothing any more when it is their turn.
DUE = """
SELECT rowid FROM responses WHERE expires_at <= ? AND continued = 0 ORDER BY expires_at DESC, rowid DESC LIMIT 1
"""

# Rows come after those they continue. Others do not count: a circle in a damaged database would keep itself for ever.
FORGET = """
DELETE FROM responses WHERE rowid = ? AND NOT EXISTS (
    SELECT 1 FROM responses AS newer
    WHERE newer.project = responses.project AND newer.previous_response_id = responses.id
        AND newer.rowid > responses.rowid
)
"""

SPARE = "UPDATE responses SET continued = 1 WHERE rowid = ?"


class Responses(Database):
    async def save(
        self,
        project: str,
        stored: StoredResponse,
        *,
        conversation: str | None = None,
        owner: str | None = None,
        events: tuple[int, Sequence[bytes]] | None = None,
    ) -> None:
        row = (project, *pack(stored))
        foreign = find_foreign(stored)
        if conversation is None and owner is None and events is None and not foreign:
            await self._writer.submit(SAVE, row)
            return
        batch = None if events is None else pack_events(*events)
        items = ([], []) if conversation is None else (pack_items(stored.input), pack_items(stored.response.output))
        await self._writer.submit(_save_bound, (row, foreign, owner, batch, conversation, items, self._now()))

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        rows = await self._reader.submit(LOAD, (project, response_id, self._now()))
        return unpack(response_id, *rows[0]) if rows else None

    async def delete(self, project: str, response_id: str) -> bool:
        deleted: int = await self._writer.submit(DELETE, (project, response_id, self._now()))
        return deleted > 0

    async def chain(self, project: str, response_id: str) -> list[Link]:
        rows = await self._reader.submit(CHAIN, (project, response_id, self._now()))
        return walk(response_id, {row[0]: LinkRecord(*row[1:]) for row in rows}.get)

    async def expire(self, now: int) -> int:
        expired = 0
        judged = step = EXPIRY_STEP
        while judged == EXPIRY_STEP:
            judged, gone = await self._writer.submit(_forget_expired, (now,))
            expired += gone
        while step == EXPIRY_STEP:
            step = await self._writer.submit(EXPIRE_CONVERSATIONS, (now, EXPIRY_STEP))
            expired += step
        return expired


def _save_bound(
    connection: sqlite3.Connection,
    row: Sequence[Any],
    foreign: list[Foreign],
    owner: str | None,
    batch: Batch | None,
    conversation: str | None,
    items: tuple[list[ItemRecord], list[ItemRecord]],
    now: float,
) -> None:
    """Save a response together with what belongs to it, and only while its run is the owner's."""
    project, response_id, _, _, _, expires_at, *_ = row
    if owner is not None and not is_held(connection, project, response_id, owner):
        raise LeaseLost(f"The run of {response_id} is not, or no longer, {owner}'s.")
    if connection.execute(SAVE, row).rowcount == 0:
        return
    note_items(connection, project, response_id, foreign)
    if batch is not None:
        append_batch(connection, project, response_id, batch)
    if conversation is not None and not append_block(
        connection, project, conversation, *items, now, expires_at, response_id=response_id
    ):
        raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")


def _forget_expired(connection: sqlite3.Connection, now: int) -> tuple[int, int]:
    """Judge the next expired responses, and delete those that nothing continues. How many were judged, and deleted."""
    gone = 0
    for judged in range(EXPIRY_STEP):
        # Asked for one by one: what goes may free the one that it continued.
        due = connection.execute(DUE, (now,)).fetchone()
        if due is None:
            return judged, gone
        if connection.execute(FORGET, due).rowcount:
            gone += 1
        else:
            connection.execute(SPARE, due)
    return EXPIRY_STEP, gone
