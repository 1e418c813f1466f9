"""Conversations and their items, shared by the SQL stores.

An operation that appends items locks the conversation first, so that the items of one response stay together.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from antiphon.errors import InvalidRequest
from antiphon.offload import LARGE_BYTES, run_sized
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, Order
from antiphon.store.history_budget import UNLIMITED, UNRESERVED_BYTES, HistoryShare, decode_history
from antiphon.store.object_limits import check_number
from antiphon.store.record import (
    ItemRecord,
    arrange_turn,
    fit_page,
    measure_texts,
    pack_items,
    pack_metadata,
    unpack_conversation,
    unpack_items,
)
from antiphon.store.sql_steps import Batch, SqlStep, StepDatabase, Steps, Variants

# Locks the row until the end of the transaction, even if it is new.
COUNT = """
INSERT INTO conversation_counts AS counts (project, number) VALUES (?, 0)
ON CONFLICT (project) DO UPDATE SET number = counts.number RETURNING number
"""

CREATE = "INSERT INTO conversations (project, id, created_at, expires_at, metadata) VALUES (?, ?, ?, ?, ?)"

LOAD = """
SELECT created_at, metadata FROM conversations
WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)
"""

LOAD_FOR_UPDATE = f"{LOAD} FOR NO KEY UPDATE"

UPDATE = "UPDATE conversations SET metadata = ? WHERE project = ? AND id = ?"

DELETE = "DELETE FROM conversations WHERE project = ? AND id = ? AND (expires_at IS NULL OR expires_at > ?)"

EXTEND_EXPIRY = "UPDATE conversations SET expires_at = ?1 WHERE project = ?2 AND id = ?3 AND expires_at < ?1"

# A new item gets a position after all that items of the conversation ever had. SQLite would use the position of a
# deleted last item again.
APPEND = Variants(
    sqlite="""
INSERT INTO items (project, conversation_id, item_id, content, position) SELECT ?1, ?2, ?3, ?4, 1 + max(
    coalesce((SELECT max(position) FROM items), 0),
    coalesce((SELECT max(position) FROM deleted_items WHERE project = ?1 AND conversation_id = ?2), 0)
)
""",
    postgres="INSERT INTO items (project, conversation_id, item_id, content) VALUES (?, ?, ?, ?)",
)

# The position before the block is the last one that an item of the conversation has or had.
BEGIN_BLOCK = """
INSERT INTO blocks (project, conversation_id, response_id, position) SELECT ?1, ?2, ?3, greatest(
    coalesce((SELECT max(position) FROM items WHERE project = ?1 AND conversation_id = ?2), 0),
    coalesce((SELECT max(position) FROM deleted_items WHERE project = ?1 AND conversation_id = ?2), 0)
)
"""

HAS_BLOCK = "SELECT 1 FROM blocks WHERE project = ? AND conversation_id = ? AND response_id = ?"

LOAD_CONTENTS = """
SELECT item_id, content FROM items WHERE project = ? AND conversation_id = ? AND item_id IN TEXTS(?)
"""

# A deleted item keeps its position.
ITEM_POSITION = """
SELECT coalesce(
    (SELECT position FROM items WHERE project = ?1 AND conversation_id = ?2 AND item_id = ?3),
    (SELECT max(position) FROM deleted_items WHERE project = ?1 AND conversation_id = ?2 AND item_id = ?3)
)
"""

_MEASURE_PAGE = "SELECT position, length(content) FROM items WHERE project = ? AND conversation_id = ?"

ASCEND = f"{_MEASURE_PAGE} AND position > ? ORDER BY position LIMIT ?"

DESCEND = f"{_MEASURE_PAGE} AND position < ? ORDER BY position DESC LIMIT ?"

LOAD_PAGE = """
SELECT content FROM items WHERE project = ? AND conversation_id = ? AND position >= ? AND position <= ?
ORDER BY position
"""

_LARGEST_POSITION = 2**63 - 1

# The position before a response, and the number of bytes of the items up to it.
MEASURE_BEFORE = f"""
SELECT last, (
    SELECT sum(length(content)) FROM items WHERE project = ?1 AND conversation_id = ?2 AND position <= last
) FROM (
    SELECT coalesce((
        SELECT position FROM blocks WHERE project = ?1 AND conversation_id = ?2 AND response_id = ?3
    ), {_LARGEST_POSITION}) AS last
    FROM conversations WHERE project = ?1 AND id = ?2 AND (expires_at IS NULL OR expires_at > ?4)
) AS conversation
"""

LOAD_BEFORE = "SELECT content FROM items WHERE project = ? AND conversation_id = ? AND position <= ? ORDER BY position"

# The content is NULL if it has more bytes than the maximum.
LOAD_ITEM = """
SELECT CASE WHEN CAST(length(content) AS bigint) <= ?5 THEN content END FROM items JOIN conversations
    ON conversations.project = items.project AND conversations.id = items.conversation_id
WHERE items.project = ?1 AND conversation_id = ?2 AND item_id = ?3 AND (expires_at IS NULL OR expires_at > ?4)
"""

RECORD_DELETED = """
INSERT INTO deleted_items (project, conversation_id, position, item_id)
SELECT project, conversation_id, position, item_id FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?
RETURNING position
"""

DELETE_ITEM = "DELETE FROM items WHERE project = ? AND conversation_id = ? AND item_id = ?"

# The statement for a page, and the position at which a list without `after` begins.
_PAGES = {"asc": (ASCEND, 0), "desc": (DESCEND, _LARGEST_POSITION)}


class TurnPlan(NamedTuple):
    """The items that a response appends to a conversation. `items` is None if they were appended before."""

    project: str
    conversation_id: str
    response_id: str | None
    items: Sequence[ItemRecord] | None


class SqlConversations(StepDatabase):
    """Base of the classes that store conversations by SQL."""

    _reads: asyncio.Semaphore

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
        await self._write(self._create, row, pack_items(items))

    async def load_conversation(self, project: str, conversation_id: str) -> Conversation | None:
        rows = await self._fetch(LOAD, (project, conversation_id, int(self._now())))
        return unpack_conversation(conversation_id, *rows[0]) if rows else None

    async def update_conversation(
        self, project: str, conversation_id: str, metadata: dict[str, str] | None
    ) -> Conversation | None:
        packed = pack_metadata(metadata)
        row = await self._write(_update, project, conversation_id, packed, int(self._now()))
        return None if row is None else unpack_conversation(conversation_id, row[0], packed)

    async def delete_conversation(self, project: str, conversation_id: str) -> bool:
        return await self._change(DELETE, (project, conversation_id, int(self._now()))) > 0

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
        return await self._write(self._append_items, project, conversation_id, *packed, int(self._now()), expires_at)

    async def list_items(
        self, project: str, conversation_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        arguments = project, conversation_id, after, limit, order, int(self._now())
        page = await self._read(self._read_page, *arguments, LARGE_BYTES)
        if isinstance(page, int):
            # Few large pages are in memory at once, however many requests need one. Small ones do not wait for them.
            async with self._reads:
                page = await self._read(self._read_page, *arguments, UNLIMITED)
                return await _unpack_page(conversation_id, page)
        return await _unpack_page(conversation_id, page)

    async def load_conversation_items(
        self, project: str, conversation_id: str, *, before: str | None = None, share: HistoryShare | None = None
    ) -> list[Item | Unknown] | None:
        limit = UNLIMITED if share is None else UNRESERVED_BYTES
        now = int(self._now())
        contents = await self._read(_read_contents, project, conversation_id, before, limit, now)
        if share is not None:
            await share.reserve(contents if isinstance(contents, int) else measure_texts(contents or ()))
        if isinstance(contents, int):
            contents = await self._read(_read_contents, project, conversation_id, before, UNLIMITED, now)
        if contents is None:
            return None
        assert not isinstance(contents, int), "the whole conversation was read"
        return await decode_history(conversation_id, contents, share)

    async def load_item(self, project: str, conversation_id: str, item_id: str) -> Item | Unknown | None:
        parameters = (project, conversation_id, self._make_item_key(item_id), int(self._now()))
        rows = await self._fetch(LOAD_ITEM, (*parameters, LARGE_BYTES))
        if rows and rows[0][0] is None:
            async with self._reads:
                rows = await self._fetch(LOAD_ITEM, (*parameters, UNLIMITED))
                return (await run_sized(UNLIMITED, unpack_items, conversation_id, rows[0]))[0] if rows else None
        return unpack_items(conversation_id, rows[0])[0] if rows else None

    async def delete_item(self, project: str, conversation_id: str, item_id: str) -> bool:
        key = self._make_item_key(item_id)
        return await self._write(_delete_item, project, conversation_id, key, int(self._now()))

    def _create(self, row: Sequence[Any], items: list[ItemRecord]) -> Steps[None]:
        project, conversation_id, *_ = row
        ((number,),) = yield SqlStep(COUNT, (project,))
        check_number(number, self._limits.max_conversations, "conversations", setting="max_conversations")
        _check_new(conversation_id, items, ())
        yield SqlStep(CREATE, row)
        yield from self._write_items(project, conversation_id, items)

    def _append_items(
        self,
        project: str,
        conversation_id: str,
        items: list[ItemRecord],
        output: list[ItemRecord] | None,
        now: int,
        expires_at: int | None,
    ) -> Steps[bool]:
        if not (yield SqlStep(LOAD_FOR_UPDATE, (project, conversation_id, now))):
            return False
        if output is not None:
            plan = yield from self._plan_turn(project, conversation_id, items, output)
        else:
            ids = {item.id for item in items if item.id is not None}
            _check_new(conversation_id, items, (yield from self._load_contents(project, conversation_id, ids)))
            plan = TurnPlan(project, conversation_id, None, items)
        yield from self._write_turn(plan, expires_at)
        return True

    def _plan_turn(
        self,
        project: str,
        conversation_id: str,
        input_items: Sequence[ItemRecord],
        output_items: Sequence[ItemRecord],
        *,
        response_id: str | None = None,
    ) -> Steps[TurnPlan]:
        """Choose the items to append, and their ids. The conversation must be locked. Nothing is written."""
        plan = TurnPlan(project, conversation_id, response_id, None)
        if response_id is not None and (yield SqlStep(HAS_BLOCK, (project, conversation_id, response_id))):
            return plan
        known: dict[str, bytes | None] = {}
        wanted = {item.id for item in (*input_items, *output_items) if item.id is not None}
        while True:
            known |= dict.fromkeys(wanted) | (yield from self._load_contents(project, conversation_id, wanted))
            try:
                return plan._replace(items=arrange_turn(input_items, output_items, known.__getitem__))
            except KeyError as missing:  # a new id for an item whose own is taken
                wanted = {missing.args[0]}

    def _write_turn(self, plan: TurnPlan, expires_at: int | None) -> Steps[None]:
        """Append the items of a plan. With `expires_at`, the conversation expires no earlier than then."""
        key = plan.project, plan.conversation_id
        if expires_at is not None:
            yield SqlStep(EXTEND_EXPIRY, (expires_at, *key))
        if plan.items is None:
            return
        if plan.response_id is not None:
            yield SqlStep(BEGIN_BLOCK, (*key, plan.response_id))
        yield from self._write_items(*key, plan.items)

    def _write_items(self, project: str, conversation_id: str, items: Sequence[ItemRecord]) -> Steps[None]:
        rows = [
            (project, conversation_id, None if item.id is None else self._make_item_key(item.id), item.content)
            for item in items
        ]
        yield Batch(APPEND, rows)

    def _load_contents(
        self, project: str, conversation_id: str, item_ids: Collection[str]
    ) -> Steps[dict[str, bytes | None]]:
        """Return the contents of those items that the conversation has."""
        if not item_ids:
            return {}
        ids = {self._make_item_key(item_id): item_id for item_id in item_ids}
        rows = yield SqlStep(LOAD_CONTENTS, (project, conversation_id, list(ids)))
        return {ids[key]: content for key, content in rows}

    def _read_page(
        self, project: str, conversation_id: str, after: str | None, limit: int, order: Order, now: int, max_bytes: int
    ) -> Steps[tuple[list[bytes], bool] | int | None]:
        """Choose the items of a page by their sizes, and read only those. None if there is no conversation.

        If they have more than `max_bytes` bytes, return only their number of bytes.
        """
        if not (yield SqlStep(LOAD, (project, conversation_id, now))):
            return None
        statement, position = _PAGES[order]
        if after is not None:
            key = self._make_item_key(after)
            ((position,),) = yield SqlStep(ITEM_POSITION, (project, conversation_id, key))
            if position is None:
                raise InvalidRequest(
                    f"The conversation has no item with id '{after}' to continue after.",
                    param="after",
                    code="invalid_value",
                )
        # One row more than requested shows that there are more.
        measured = yield SqlStep(statement, (project, conversation_id, position, limit + 1))
        count, has_more = fit_page((size for _, size in measured), limit)
        if count == 0:
            return [], has_more
        size = sum(size for _, size in measured[:count])
        if size > max_bytes:
            return int(size)
        bounds = sorted((measured[0][0], measured[count - 1][0]))
        contents = [content for (content,) in (yield SqlStep(LOAD_PAGE, (project, conversation_id, *bounds)))]
        return contents if order == "asc" else contents[::-1], has_more


async def _unpack_page(conversation_id: str, page: tuple[list[bytes], bool] | int | None) -> ItemRows | None:
    if page is None:
        return None
    assert not isinstance(page, int), "the whole page was read"
    contents, has_more = page
    items = await run_sized(measure_texts(contents), unpack_items, conversation_id, contents)
    return ItemRows(items=items, has_more=has_more)


def _check_new(conversation_id: str, items: Sequence[ItemRecord], known_ids: Collection[str]) -> None:
    """Raise InvalidRequest if the conversation has an item with one of the ids, or if two items have the same id."""
    taken = set(known_ids)
    for item in items:
        if item.id in taken:
            raise InvalidRequest(
                f"The conversation '{conversation_id}' already has an item with id '{item.id}'.",
                param="items",
                code="invalid_value",
            )
        if item.id is not None:
            taken.add(item.id)


def _update(project: str, conversation_id: str, metadata: bytes, now: int) -> Steps[Sequence[Any] | None]:
    rows = yield SqlStep(LOAD_FOR_UPDATE, (project, conversation_id, now))
    if not rows:
        return None
    yield SqlStep(UPDATE, (metadata, project, conversation_id))
    row: Sequence[Any] = rows[0]
    return row


def _read_contents(
    project: str, conversation_id: str, before: str | None, max_bytes: int, now: int
) -> Steps[list[bytes] | int | None]:
    """Return the encoded items of a conversation before the response `before`. None if there is no conversation.

    If they have more than `max_bytes` bytes, return only their number of bytes.
    """
    rows = yield SqlStep(MEASURE_BEFORE, (project, conversation_id, before, now))
    if not rows:
        return None
    ((last, size),) = rows
    if size is None or size > max_bytes:
        return [] if size is None else int(size)
    return [content for (content,) in (yield SqlStep(LOAD_BEFORE, (project, conversation_id, last)))]


def _delete_item(project: str, conversation_id: str, item_key: str, now: int) -> Steps[bool]:
    if not (yield SqlStep(LOAD_FOR_UPDATE, (project, conversation_id, now))):
        return False
    if not (yield SqlStep(RECORD_DELETED, (project, conversation_id, item_key))):
        return False
    yield SqlStep(DELETE_ITEM, (project, conversation_id, item_key))
    return True
