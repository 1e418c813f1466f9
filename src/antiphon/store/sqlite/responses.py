"""Responses in SQLite, their chains and expiry, and references to their items.

Triggers of the schema delete the run of a final response, and the run and the events of a deleted one.
"""

import asyncio
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from antiphon.errors import NotFound
from antiphon.offload import LARGE_BYTES, is_large, mark_large, run_in_thread, run_sized
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, LeaseLost, Link, Order, StoredResponse
from antiphon.store.record import (
    Chain,
    EventBatch,
    ForeignItem,
    ItemRecord,
    LinkRecord,
    add_tools,
    find_foreign_items,
    finish_chain,
    group_by_response,
    measure_records,
    pack_events,
    pack_items,
    pack_response,
    unpack_bare_response,
    unpack_item,
    unpack_items,
    unpack_links,
    unpack_named_items,
    unpack_output,
    unpack_page,
    unpack_response,
    walk_chain,
)
from antiphon.store.sqlite.conversations import EXPIRE as EXPIRE_CONVERSATIONS
from antiphon.store.sqlite.conversations import append_block
from antiphon.store.sqlite.database import Database, RowInsert
from antiphon.store.sqlite.events import append_batches
from antiphon.store.sqlite.leases import is_owned

# Number of expired responses or conversations deleted in one transaction, so that other writers wait only briefly.
EXPIRY_STEP = 100

# Number of references that are searched at once, so that other readers wait only briefly.
ITEMS_STEP = 200

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

# Number of links to read first, and the factor by which it grows while the link before them is not in the cache:
# another process may have added the newest links.
FIRST_LINKS = 2
LINKS_GROWTH = 32

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

LOAD_ITEMS = """
SELECT input, output FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

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


class SqliteResponses(Database):
    async def save(
        self,
        project: str,
        stored: StoredResponse,
        *,
        conversation: str | None = None,
        owner: str | None = None,
        events: tuple[int, Sequence[bytes]] | None = None,
    ) -> None:
        if is_large():
            # It is saved even if the caller is cancelled while a thread encodes it.
            await asyncio.shield(asyncio.ensure_future(self._save_large(project, stored, conversation, owner, events)))
            return
        await self._submit(*_pack(project, stored, conversation, owner, events))

    async def _save_large(self, *arguments: Any) -> None:
        await self._submit(*await run_in_thread(_pack, *arguments))

    async def _submit(self, row: Sequence[Any], *related: Any) -> None:
        if not related:
            await self._writer.submit(SAVE, row)
            return
        await self._writer.submit(_save_with_related, (row, *related, self._now()))

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        rows = await self._reader.submit(LOAD, (project, response_id, self._now()))
        return await run_sized(_measure(rows), unpack_response, response_id, *rows[0]) if rows else None

    async def list_input_items(
        self, project: str, response_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        rows = await self._reader.submit(LOAD_INPUT, (project, response_id, self._now()))
        if not rows:
            return None
        unpack = partial(unpack_page, after=after, limit=limit, order=order)
        return await run_sized(_measure(rows), unpack, response_id, *rows[0])

    async def load_response(self, project: str, response_id: str) -> Response | None:
        # The rows of many requests must not be in memory at once: each can be large.
        async with self._reads:
            rows = await self._reader.submit(LOAD_RESPONSE, (project, response_id, self._now()))
            return await run_sized(_measure(rows), unpack_bare_response, response_id, *rows[0]) if rows else None

    async def load_bare_response(self, project: str, response_id: str) -> Response | None:
        rows = await self._reader.submit(LOAD_BODY, (project, response_id, self._now()))
        return unpack_bare_response(response_id, *rows[0]) if rows else None

    async def delete(self, project: str, response_id: str) -> bool:
        deleted: int = await self._writer.submit(DELETE, (project, response_id, self._now()))
        return deleted > 0

    async def load_chain(self, project: str, response_id: str, *, with_tools: bool = False) -> list[Link]:
        now, with_body = self._now(), response_id if with_tools else None
        limit = FIRST_LINKS
        while True:
            # Each statement reads the chain from its newest response, so each result is one snapshot.
            rows = await self._reader.submit(CHAIN, (project, response_id, now, limit, with_body, project))
            if not rows:
                return []
            records = {row[0]: LinkRecord(*row[:-1]) for row in rows}
            chain = await self._build_chain(project, response_id, records, revision=rows[0][-1])
            if chain.next_id is None or len(rows) < limit:
                newest = records[response_id].body
                if with_tools and newest is not None:
                    chain.links[-1] = add_tools(chain.links[-1], newest)
                return chain.links
            limit *= LINKS_GROWTH

    async def _build_chain(
        self, project: str, response_id: str, records: dict[str, LinkRecord], *, revision: int
    ) -> Chain:
        cache = self._chain_cache
        bytes_found = cache.bytes_found
        walk = walk_chain(response_id, records.get, find_link=lambda link_id: cache.find(project, link_id, revision))
        if cache.bytes_found - bytes_found > LARGE_BYTES:
            mark_large()
        chain = finish_chain(walk, await run_sized(measure_records(walk.records), unpack_links, walk.records))
        for link in chain.decoded:
            cache.add(project, link, revision)
        return chain

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
        return expired

    async def load_outputs(self, project: str, response_ids: Sequence[str]) -> list[Item | Unknown]:
        outputs: list[tuple[str, bytes]] = await self._reader.submit(
            _read_outputs, (project, response_ids, self._now())
        )
        return await run_sized(_measure(outputs), _unpack_outputs, outputs)

    async def load_items(self, project: str, item_ids: Collection[str]) -> dict[str, Item | Unknown]:
        found: dict[str, Item | Unknown] = {}
        for response_id, wanted in group_by_response(item_ids).items():
            rows = await self._reader.submit(LOAD_ITEMS, (project, response_id, self._now()))
            if rows:
                unpack = partial(unpack_named_items, wanted, lossless=True)
                found |= await run_sized(_measure(rows), unpack, response_id, *rows[0])
        rest = [item_id for item_id in item_ids if item_id not in found]
        for start in range(0, len(rest), ITEMS_STEP):
            step = rest[start : start + ITEMS_STEP]
            located = await self._reader.submit(_locate_items, (project, step, self._now()))
            found |= await self._load_located(project, located)
        return found

    async def _load_located(
        self, project: str, located: Sequence[tuple[str, str | None, str, bytes]]
    ) -> dict[str, Item | Unknown]:
        """Load the items that `_locate_items` has found, each response once."""
        found: dict[str, Item | Unknown] = {}
        by_response: dict[str, set[str]] = {}
        for item_id, response_id, conversation_id, content in located:
            if response_id is not None:
                by_response.setdefault(response_id, set()).add(item_id)
            else:
                found[item_id] = unpack_items(conversation_id, [content])[0]
        for response_id, wanted in by_response.items():
            rows = await self._reader.submit(LOAD_ITEMS, (project, response_id, self._now()))
            if rows:
                found |= await run_sized(_measure(rows), unpack_named_items, wanted, response_id, *rows[0])
        return found

    async def find_item(self, project: str, item_id: str) -> Item | Unknown | None:
        parameters = (project, item_id, self._now())
        rows = await self._reader.submit(FIND_IN_RESPONSE, parameters)
        if rows:
            return await run_sized(_measure(rows), unpack_item, item_id, *rows[0])
        rows = await self._reader.submit(FIND_IN_CONVERSATION, parameters)
        return unpack_items(rows[0][0], rows[0][1:])[0] if rows else None


def index_items(connection: sqlite3.Connection, project: str, response_id: str, foreign: Iterable[ForeignItem]) -> None:
    """Index the foreign items of a response that has just been written."""
    connection.executemany(INDEX_ITEM, ((project, response_id, each.item_id, project, each.source) for each in foreign))


def _pack(
    project: str,
    stored: StoredResponse,
    conversation: str | None,
    owner: str | None,
    events: tuple[int, Sequence[bytes]] | None,
) -> Sequence[Any]:
    """Return the row of a response. If it has related rows, return also the other arguments of `_save_with_related`."""
    row = (project, *pack_response(stored))
    foreign = find_foreign_items(stored)
    if conversation is None and owner is None and events is None and not foreign:
        return (row,)
    batches = [] if events is None else pack_events(*events)
    items = ([], []) if conversation is None else (pack_items(stored.input), pack_items(stored.response.output))
    return row, foreign, owner, batches, conversation, items


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


def _measure(rows: Iterable[Sequence[Any]]) -> int:
    """Return the number of bytes in the rows."""
    return sum(len(value) for row in rows for value in row if isinstance(value, bytes))


def _unpack_outputs(outputs: Iterable[tuple[str, bytes]]) -> list[Item | Unknown]:
    return [item for output in outputs for item in unpack_output(*output)]


def _locate_items(
    connection: sqlite3.Connection, project: str, item_ids: Sequence[str], now: float
) -> list[tuple[str, str | None, str | None, bytes | None]]:
    """Return for each item that exists its id, and either its response or its conversation and content."""
    located: list[tuple[str, str | None, str | None, bytes | None]] = []
    for item_id in item_ids:
        parameters = (project, item_id, now)
        if (row := connection.execute(LOCATE_IN_RESPONSE, parameters).fetchone()) is not None:
            located.append((item_id, row[0], None, None))
        elif (row := connection.execute(FIND_IN_CONVERSATION, parameters).fetchone()) is not None:
            located.append((item_id, None, *row))
    return located


def _read_outputs(
    connection: sqlite3.Connection, project: str, response_ids: Sequence[str], now: float
) -> list[tuple[str, bytes]]:
    found = ((each, connection.execute(LOAD_OUTPUT, (project, each, now)).fetchone()) for each in response_ids)
    return [(response_id, row[0]) for response_id, row in found if row is not None]
