"""Responses, shared by the SQL stores: how one is saved, loaded and deleted.

Triggers of the schema delete the run of a final response, and the run and the events of a deleted one.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from antiphon.errors import NotFound, StoreUnavailable
from antiphon.offload import LARGE_BYTES, is_large, run_in_thread, run_sized
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, LeaseLost, Order, StoredResponse
from antiphon.store.changes import EventsAppended, ResponseDeleted, ResponseSaved
from antiphon.store.event_batches import EventBatch, pack_events
from antiphon.store.item_offsets import ItemOffsets, OffsetCache, build_offsets
from antiphon.store.record import (
    ForeignItem,
    ItemRecord,
    find_foreign_items,
    pack_items,
    pack_response,
    unpack_bare_response,
    unpack_named_items,
    unpack_page,
    unpack_response,
    unpack_slice,
)
from antiphon.store.sql_conversations import LOAD_FOR_UPDATE as LOCK_CONVERSATION
from antiphon.store.sql_conversations import SqlConversations, TurnPlan
from antiphon.store.sql_events import HOLD as HOLD_RUN
from antiphon.store.sql_events import append_batches, find_missing
from antiphon.store.sql_steps import Batch, RowInsert, SqlStep, Steps

T = TypeVar("T")

INSERT = RowInsert(
    "INSERT INTO responses (project, id, previous_response_id, created_at, final, expires_at, input, output, body)",
    columns=9,
)

# PostgreSQL only. A save that is repeated because its commit got no answer may have created the response again.
_DELETE_AGAIN = """
DELETE FROM responses WHERE project = ?1 AND id = ?2
    AND EXISTS (SELECT 1 FROM deletions WHERE project = ?1 AND response_id = ?2)
"""

SAVE = RowInsert(
    INSERT.into,
    columns=INSERT.columns,
    after_repeat=_DELETE_AGAIN,
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

# A response is not saved again with an unfinished status after its final one.
LOCK = "SELECT final FROM responses WHERE project = ? AND id = ? FOR UPDATE"

# True if the final response is stored exactly as it is to be saved.
IS_SAVED = "SELECT 1 FROM responses WHERE project = ? AND id = ? AND final AND output = ? AND body = ?"

# Items produced by a stored response are not indexed: they are found in that response and deleted with it.
INDEX_ITEM = """
INSERT INTO foreign_items (project, response_id, item_id) SELECT ?1, ?2, ?3
WHERE NOT EXISTS (SELECT 1 FROM responses WHERE project = ?1 AND id = ?4) ON CONFLICT DO NOTHING
"""

_LIVE = "FROM responses WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

DELETE = f"DELETE {_LIVE}"

LOAD = f"SELECT expires_at, input, output, body {_LIVE}"

LOAD_RESPONSE = f"SELECT body, output {_LIVE}"

LOAD_BODY = f"SELECT body {_LIVE}"

LOAD_INPUT = f"SELECT input {_LIVE}"

# The statements for small values have NULL instead of large ones.
LOAD_SMALL_INPUT = f"SELECT CASE WHEN length(input) <= {LARGE_BYTES} THEN input END {_LIVE}"

LOAD_ITEMS = f"SELECT input, output {_LIVE}"

_IS_SMALL_RESPONSE = f"length(body) + length(output) <= {LARGE_BYTES}"

LOAD_SMALL_RESPONSE = (
    f"SELECT CASE WHEN {_IS_SMALL_RESPONSE} THEN body END, CASE WHEN {_IS_SMALL_RESPONSE} THEN output END {_LIVE}"
)

_IS_SMALL = f"length(input) + length(output) <= {LARGE_BYTES}"

LOAD_SMALL_ITEMS = f"SELECT CASE WHEN {_IS_SMALL} THEN input END, CASE WHEN {_IS_SMALL} THEN output END {_LIVE}"

LOAD_INPUT_PART = """
SELECT substr(input, CAST(?4 AS integer) + 1, CAST(?5 AS integer)) FROM responses
WHERE project = ?1 AND id = ?2 AND (expires_at IS NULL OR expires_at > ?3)
"""


class _RelatedRows(NamedTuple):
    """The rows that are written together with a response: its foreign items, events and conversation items.

    With an `owner`, the response is saved only if the owner has its run.
    """

    foreign: list[ForeignItem]
    owner: str | None
    batches: list[EventBatch]
    conversation: str | None
    items: tuple[list[ItemRecord], list[ItemRecord]]


class SqlResponses(SqlConversations):
    """Base of the classes that store responses by SQL."""

    _offsets: OffsetCache

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

    async def _submit(self, row: Sequence[Any], related: _RelatedRows | None) -> None:
        """Write the result of `_pack`."""
        if related is None and self._is_uncertain(row[0], row[1]):
            related = _RelatedRows(foreign=[], owner=None, batches=[], conversation=None, items=([], []))
        if related is not None:
            await self._save_with_related(row, related)
            return
        try:
            await self._insert(SAVE, row)
        except StoreUnavailable:
            with self._track_write(row[0], row[1], -1):  # the caller may try again
                raise

    async def _save_with_related(self, row: Sequence[Any], related: _RelatedRows) -> None:
        batches = related.batches
        first = batches[0].first if batches else -1
        with self._track_write(row[0], row[1], first) as is_repeated:
            await self._write(self._write_response, row, related, is_repeated)
        if related.owner is not None:
            self.announce(EventsAppended(row[1], batches[-1].last) if batches else ResponseSaved(row[1]))

    def _write_response(
        self,
        row: Sequence[Any],
        related: _RelatedRows,
        is_repeated: bool,  # noqa: FBT001 - steps get their parameters by position
    ) -> Steps[None]:
        """Save a response with its events and conversation items. With an owner, check that it has the run."""
        project, response_id, _, _, is_final, expires_at, _, output, body = row
        foreign, owner, batches, conversation, items = related
        if owner is not None and not (yield SqlStep(HOLD_RUN, (project, response_id, owner))):
            if is_repeated and (yield SqlStep(IS_SAVED, (project, response_id, output, body))):
                return  # the earlier write was committed, and has ended the run
            raise LeaseLost(f"{owner} does not own the run of {response_id}.")
        if not is_final and any(final for (final,) in (yield SqlStep(LOCK, (project, response_id)))):
            return
        missing = yield from find_missing(project, response_id, batches, is_repeated=is_repeated)
        plan: TurnPlan | None = None
        if conversation is not None:
            if not (yield SqlStep(LOCK_CONVERSATION, (project, conversation, int(self._now())))):
                raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")
            plan = yield from self._plan_turn(project, conversation, *items, response_id=response_id)
        yield SqlStep(SAVE.one_row, row)
        yield Batch(INDEX_ITEM, self._make_index_rows(project, response_id, foreign))
        yield from append_batches(project, response_id, missing)
        if plan is not None:
            yield from self._write_turn(plan, expires_at)
        if is_repeated:
            yield SqlStep(_DELETE_AGAIN, (project, response_id))

    def _make_index_rows(
        self, project: str, response_id: str, foreign: Iterable[ForeignItem]
    ) -> list[tuple[str, str, str, str | None]]:
        """Return the rows of INDEX_ITEM for the foreign items of a response that has just been written."""
        return [(project, response_id, self._make_item_key(each.item_id), each.source) for each in foreign]

    async def delete(self, project: str, response_id: str) -> bool:
        is_deleted = await self._change(DELETE, (project, response_id, int(self._now()))) > 0
        if is_deleted:
            self.announce(ResponseDeleted(response_id))
        return is_deleted

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        rows = await self._fetch(LOAD, (project, response_id, int(self._now())))
        return await run_sized(_measure(rows), unpack_response, response_id, *rows[0]) if rows else None

    async def list_input_items(
        self, project: str, response_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        def unpack(items: bytes) -> ItemOffsets | ItemRows:
            offsets = build_offsets(items) if len(items) > LARGE_BYTES else None
            return offsets or unpack_page(response_id, items, after=after, limit=limit, order=order)

        key = project, response_id
        offsets = self._offsets.find(key)
        if offsets is None:
            found = await self._unpack_arrays(
                project,
                response_id,
                unpack,
                small=LOAD_SMALL_INPUT,
                whole=LOAD_INPUT,
                find=lambda: self._offsets.find(key),
            )
            if not isinstance(found, ItemOffsets):
                return found
            self._offsets.add(key, found)
            offsets = found
        return await self._load_page(project, response_id, offsets, after=after, limit=limit, order=order)

    async def _load_page(
        self, project: str, response_id: str, offsets: ItemOffsets, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        """Read a page of a large array without the rest of it."""
        page = offsets.find_page(after=after, limit=limit, order=order)
        rows = await self._read_input_part(project, response_id, page.start, page.end - page.start)
        if not rows:
            self._offsets.remove((project, response_id))
            return None
        items = await run_sized(_measure(rows), partial(unpack_slice, order=order), response_id, rows[0][0])
        return ItemRows(items=items, has_more=page.has_more)

    async def _unpack_arrays(
        self,
        project: str,
        response_id: str,
        unpack: Callable[..., T],
        *,
        small: str,
        whole: str,
        find: Callable[[], T | None] = lambda: None,
    ) -> T | None:
        """Return the result of a function of values of a response, or None if there is no response.

        Few large values are in memory at once, however many requests need one. Small ones do not wait for them. `find`
        returns the result if another request has computed it meanwhile.
        """
        parameters = (project, response_id, int(self._now()))
        rows = await self._fetch(small, parameters)
        if rows and None in rows[0]:
            async with self._reads:
                if (found := find()) is not None:
                    return found
                rows = await self._fetch(whole, parameters)
                return await run_sized(_measure(rows), unpack, *rows[0]) if rows else None
        return unpack(*rows[0]) if rows else None

    async def _load_named_items(
        self, project: str, response_id: str, item_ids: Collection[str], *, lossless: bool = False
    ) -> dict[str, Item | Unknown]:
        unpack = partial(unpack_named_items, item_ids, response_id, lossless=lossless)
        found = await self._unpack_arrays(project, response_id, unpack, small=LOAD_SMALL_ITEMS, whole=LOAD_ITEMS)
        return found or {}

    async def load_response(self, project: str, response_id: str) -> Response | None:
        unpack = partial(unpack_bare_response, response_id)
        return await self._unpack_arrays(project, response_id, unpack, small=LOAD_SMALL_RESPONSE, whole=LOAD_RESPONSE)

    async def load_bare_response(self, project: str, response_id: str) -> Response | None:
        rows = await self._fetch(LOAD_BODY, (project, response_id, int(self._now())))
        return await run_sized(_measure(rows), unpack_bare_response, response_id, *rows[0]) if rows else None

    async def _read_input_part(self, project: str, response_id: str, start: int, size: int) -> list[Any]:
        """Return a row with a part of the encoded input, or no row if there is no response."""
        return await self._fetch(LOAD_INPUT_PART, (project, response_id, int(self._now()), start, size))


def _pack(
    project: str,
    stored: StoredResponse,
    conversation: str | None,
    owner: str | None,
    events: tuple[int, Sequence[bytes]] | None,
) -> tuple[Sequence[Any], _RelatedRows | None]:
    """Return the row of a response, and its related rows if it has any or belongs to a run."""
    row = (project, *pack_response(stored))
    foreign = find_foreign_items(stored)
    if conversation is None and owner is None and events is None and not foreign:
        return row, None
    batches = [] if events is None else pack_events(*events)
    items = ([], []) if conversation is None else (pack_items(stored.input), pack_items(stored.response.output))
    return row, _RelatedRows(foreign, owner, batches, conversation, items)


def _measure(rows: Iterable[Sequence[Any]]) -> int:
    """Return the number of bytes in the rows."""
    return sum(len(value) for row in rows for value in row if isinstance(value, bytes))
