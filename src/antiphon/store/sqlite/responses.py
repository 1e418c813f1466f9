"""Responses in SQLite, their chains and expiry, and the locations of their items.

Triggers of the schema delete the run of a final response, and the run and the events of a deleted one.
"""

import sqlite3
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from antiphon.errors import NotFound
from antiphon.offload import LARGE_BYTES
from antiphon.store.base import LeaseLost
from antiphon.store.record import EventBatch, ForeignItem, ItemRecord
from antiphon.store.sql_responses import LocatedItem, ResponseStatements, SqlResponses
from antiphon.store.sqlite.conversations import EXPIRE as EXPIRE_CONVERSATIONS
from antiphon.store.sqlite.conversations import append_block
from antiphon.store.sqlite.database import Database, RowInsert
from antiphon.store.sqlite.events import append_batches
from antiphon.store.sqlite.hosted_steps import EXPIRE_CLAIMS
from antiphon.store.sqlite.leases import is_owned

# Number of expired responses or conversations deleted in one transaction, so that other writers wait only briefly.
EXPIRY_STEP = 100

INSERT = RowInsert(
    "INSERT INTO responses (project, id, previous_response_id, created_at, final, expires_at, input, output, body)",
    columns=9,
)

SAVE = RowInsert(
    INSERT.into,
    columns=INSERT.columns,
    rest="""
ON CONFLICT (project, id) DO UPDATE SET
    previous_response_id = excluded.previous_response_id,
    created_at = excluded.created_at,
    final = excluded.final,
    expires_at = excluded.expires_at,
    input = excluded.input,
    output = excluded.output,
    body = excluded.body
WHERE excluded.final >= responses.final
""",
)

LOAD = """
SELECT expires_at, input, output, body FROM responses
WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

LOAD_RESPONSE = """
SELECT body, output FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

LOAD_BODY = "SELECT body FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

DELETE = "DELETE FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

# Only the newest response must not have expired. The recursive part reads only keys. UNION, not UNION ALL, ends the
# recursion at a row that repeats. The order of the result is undefined; build_chain() restores it. The body is read
# only for the oldest response, because only a response that continues none can belong to a conversation, and for the
# response whose tools are requested.
CHAIN = """
WITH RECURSIVE walked (project, id, previous, place) AS (
    SELECT project, id, previous_response_id, rowid FROM responses
    WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
    UNION
    SELECT older.project, older.id, older.previous_response_id, older.rowid
    FROM walked JOIN responses AS older ON older.project = walked.project AND older.id = walked.previous
    LIMIT ?
)
SELECT walked.id, previous, final, input, output, CASE WHEN previous IS NULL OR walked.id = ? THEN body END,
    coalesce((SELECT revision FROM revisions WHERE revisions.project = ?), 0)
FROM walked JOIN responses ON responses.rowid = place
"""

# The last response of a chain comes first, so that no response continues the one before it when that one follows.
DUE = """
SELECT rowid FROM responses WHERE expires_at <= ? AND continued = 0 ORDER BY expires_at DESC, rowid DESC LIMIT 1
"""

# A row comes after the row that it continues. Others do not count: a cycle in a damaged database would never expire.
DELETE_EXPIRED = """
DELETE FROM responses WHERE rowid = ? AND NOT EXISTS (
    SELECT 1 FROM responses AS newer
    WHERE newer.project = responses.project AND newer.previous_response_id = responses.id
        AND newer.rowid > responses.rowid
)
"""

MARK_CONTINUED = "UPDATE responses SET continued = 1 WHERE rowid = ?"

# Items produced by a stored response are not indexed: they are found in that response and deleted with it.
INDEX_ITEM = """
INSERT OR IGNORE INTO foreign_items (project, response_id, item_id) SELECT ?, ?, ?
WHERE NOT EXISTS (SELECT 1 FROM responses WHERE project = ? AND id = ?)
"""

LOAD_OUTPUT = "SELECT output FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

LOAD_INPUT = "SELECT input FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

LOAD_SMALL_INPUT = LOAD_INPUT.replace("SELECT input", f"SELECT CASE WHEN length(input) <= {LARGE_BYTES} THEN input END")

LOCATE = "SELECT rowid FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

LOAD_ITEMS = """
SELECT input, output FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

LOAD_SMALL_ITEMS = LOAD_ITEMS.replace(
    "SELECT input, output",
    f"""SELECT CASE WHEN length(input) + length(output) <= {LARGE_BYTES} THEN input END,
    CASE WHEN length(input) + length(output) <= {LARGE_BYTES} THEN output END""",
)

# The response that has an item which it did not produce.
LOCATE_IN_RESPONSE = """
SELECT id FROM responses WHERE rowid = (
    SELECT max(responses.rowid) FROM foreign_items JOIN responses
        ON responses.project = foreign_items.project AND responses.id = response_id
    WHERE foreign_items.project = ? AND item_id = ? AND (expires_at IS NULL OR expires_at > ?)
)
"""

FIND_IN_RESPONSE = LOCATE_IN_RESPONSE.replace("SELECT id FROM", "SELECT id, input, output FROM")

FIND_IN_CONVERSATION = """
SELECT conversation_id, content FROM items WHERE place = (
    SELECT max(place) FROM items JOIN conversations
        ON conversations.project = items.project AND conversations.id = items.conversation_id
    WHERE items.project = ? AND item_id = ? AND (expires_at IS NULL OR expires_at > ?)
)
"""


def _read_input_part(
    connection: sqlite3.Connection, project: str, response_id: str, now: float, start: int, size: int
) -> list[tuple[bytes]]:
    """Read a part of an input. SQL would read all of it first."""
    row = connection.execute(LOCATE, (project, response_id, now)).fetchone()
    if row is None:
        return []
    with connection.blobopen("responses", "input", row[0], readonly=True) as blob:
        blob.seek(start)
        return [(blob.read(size),)]


STATEMENTS = ResponseStatements(
    load=LOAD,
    load_response=LOAD_RESPONSE,
    load_body=LOAD_BODY,
    load_input=LOAD_INPUT,
    load_small_input=LOAD_SMALL_INPUT,
    load_input_part=_read_input_part,
    load_items=LOAD_ITEMS,
    load_small_items=LOAD_SMALL_ITEMS,
    chain=CHAIN,
    find_in_response=FIND_IN_RESPONSE,
    find_in_conversation=FIND_IN_CONVERSATION,
)


class SqliteResponses(Database, SqlResponses):
    _statements = STATEMENTS

    def _submit(self, row: Sequence[Any], *related: Any) -> Awaitable[None]:
        if not related:
            return self._writer.submit(SAVE, row)
        return self._writer.submit(_save_with_related, (row, *related, self._now()))

    async def delete(self, project: str, response_id: str) -> bool:
        deleted: int = await self._writer.submit(DELETE, (project, response_id, self._now()))
        return deleted > 0

    async def expire(self, now: int) -> int:
        expired = 0
        checked = EXPIRY_STEP
        while checked == EXPIRY_STEP:
            checked, deleted = await self._writer.submit(_delete_expired, (now,))
            expired += deleted
        deleted = EXPIRY_STEP
        while deleted == EXPIRY_STEP:
            deleted = await self._writer.submit(EXPIRE_CONVERSATIONS, (now, EXPIRY_STEP))
            expired += deleted
        await self._writer.submit(EXPIRE_CLAIMS, (now,))
        return expired

    async def _read_outputs(self, project: str, response_ids: Sequence[str]) -> list[tuple[str, bytes]]:
        outputs: list[tuple[str, bytes]] = await self._reader.submit(
            _read_outputs, (project, response_ids, self._now())
        )
        return outputs

    async def _locate_items(self, project: str, item_ids: Sequence[str]) -> list[LocatedItem]:
        located: list[LocatedItem] = await self._reader.submit(_locate_items, (project, item_ids, self._now()))
        return located


def index_items(connection: sqlite3.Connection, project: str, response_id: str, foreign: Iterable[ForeignItem]) -> None:
    """Index the foreign items of a response that has just been written."""
    connection.executemany(INDEX_ITEM, ((project, response_id, each.item_id, project, each.source) for each in foreign))


def _save_with_related(
    connection: sqlite3.Connection,
    row: Sequence[Any],
    foreign: list[ForeignItem],
    owner: str | None,
    batches: list[EventBatch],
    conversation: str | None,
    items: tuple[list[ItemRecord], list[ItemRecord]],
    now: float,
) -> None:
    """Save a response with its events and conversation items. With an owner, check that it has the run."""
    project, response_id, _, _, _, expires_at, *_ = row
    if owner is not None and not is_owned(connection, project, response_id, owner):
        raise LeaseLost(f"{owner} does not own the run of {response_id}.")
    if connection.execute(SAVE.one_row, row).rowcount == 0:
        return
    index_items(connection, project, response_id, foreign)
    append_batches(connection, project, response_id, batches)
    if conversation is not None and not append_block(
        connection, project, conversation, *items, now, expires_at, response_id=response_id
    ):
        raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")


def _delete_expired(connection: sqlite3.Connection, now: int) -> tuple[int, int]:
    """Delete the next expired responses that none continues. Return how many were checked, and how many deleted."""
    deleted = 0
    for checked in range(EXPIRY_STEP):
        # Read one by one, because deleting a response can make the one that it continued due.
        due = connection.execute(DUE, (now,)).fetchone()
        if due is None:
            return checked, deleted
        if connection.execute(DELETE_EXPIRED, due).rowcount:
            deleted += 1
        else:
            connection.execute(MARK_CONTINUED, due)
    return EXPIRY_STEP, deleted


def _locate_items(
    connection: sqlite3.Connection, project: str, item_ids: Sequence[str], now: float
) -> list[LocatedItem]:
    located: list[LocatedItem] = []
    for item_id in item_ids:
        parameters = (project, item_id, now)
        if (row := connection.execute(LOCATE_IN_RESPONSE, parameters).fetchone()) is not None:
            located.append(LocatedItem(item_id, row[0]))
        elif (row := connection.execute(FIND_IN_CONVERSATION, parameters).fetchone()) is not None:
            located.append(LocatedItem(item_id, None, *row))
    return located


def _read_outputs(
    connection: sqlite3.Connection, project: str, response_ids: Sequence[str], now: float
) -> list[tuple[str, bytes]]:
    found = ((each, connection.execute(LOAD_OUTPUT, (project, each, now)).fetchone()) for each in response_ids)
    return [(response_id, row[0]) for response_id, row in found if row is not None]
