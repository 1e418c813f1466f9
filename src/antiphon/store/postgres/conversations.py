"""Conversations and their items in PostgreSQL.

An operation that appends items locks the conversation first, so that the items of one response stay together.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from antiphon.errors import InvalidRequest
from antiphon.offload import run_sized
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, Order
from antiphon.store.postgres.connection import escape_all, make_item_key
from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.postgres.writer import GroupedStatement
from antiphon.store.record import (
    ItemRecord,
    arrange_turn,
    measure_texts,
    unpack_items,
)
from antiphon.store.sql_conversations import ConversationWork, SqlConversations

if TYPE_CHECKING:
    from asyncpg import Connection

CREATE = "INSERT INTO conversations (project, id, created_at, expires_at, metadata) VALUES ($1, $2, $3, $4, $5)"

LOAD = """
SELECT created_at, metadata FROM conversations
WHERE project = $1 AND id = $2 AND (expires_at IS NULL OR expires_at > $3::float8)
"""

LOAD_FOR_UPDATE = f"{LOAD} FOR NO KEY UPDATE"

UPDATE = "UPDATE conversations SET metadata = $1 WHERE project = $2 AND id = $3"

DELETE = GroupedStatement(
    """
WITH deleted AS (
    DELETE FROM conversations WHERE project = $1 AND id = $2 AND (expires_at IS NULL OR expires_at > $3::float8)
    RETURNING 1
)
SELECT count(*) FROM deleted
"""
)

EXTEND_EXPIRY = "UPDATE conversations SET expires_at = $1 WHERE project = $2 AND id = $3 AND expires_at < $1"

APPEND = "INSERT INTO items (project, conversation_id, item_id, content) VALUES ($1, $2, $3, $4)"

# The position before the block is the last one that an item of the conversation has or had.
BEGIN_BLOCK = """
INSERT INTO blocks (project, conversation_id, response_id, position) SELECT $1, $2, $3, greatest(
    (SELECT max(position) FROM items WHERE project = $1 AND conversation_id = $2),
    (SELECT max(position) FROM deleted_items WHERE project = $1 AND conversation_id = $2),
    0
)
"""

HAS_BLOCK = """
SELECT EXISTS (SELECT 1 FROM blocks WHERE project = $1 AND conversation_id = $2 AND response_id = $3)
"""

BLOCK_POSITION = "SELECT position FROM blocks WHERE project = $1 AND conversation_id = $2 AND response_id = $3"

CONTENTS = """
SELECT item_id, content FROM items WHERE project = $1 AND conversation_id = $2 AND item_id = ANY ($3::text[])
"""

# A deleted item keeps its position.
ITEM_POSITION = """
SELECT coalesce(
    (SELECT position FROM items WHERE project = $1 AND conversation_id = $2 AND item_id = $3),
    (SELECT max(position) FROM deleted_items WHERE project = $1 AND conversation_id = $2 AND item_id = $3)
)
"""

ASCEND = """
SELECT content FROM items WHERE project = $1 AND conversation_id = $2 AND position > $3 ORDER BY position LIMIT $4
"""

DESCEND = """
SELECT content FROM items WHERE project = $1 AND conversation_id = $2 AND position < $3
ORDER BY position DESC LIMIT $4
"""

BEFORE = "SELECT content FROM items WHERE project = $1 AND conversation_id = $2 AND position <= $3 ORDER BY position"

LOAD_ITEM = """
SELECT content FROM items JOIN conversations
    ON conversations.project = items.project AND conversations.id = items.conversation_id
WHERE items.project = $1 AND conversation_id = $2 AND item_id = $3 AND (expires_at IS NULL OR expires_at > $4::float8)
"""

DELETE_ITEM = """
WITH deleted AS (
    DELETE FROM items WHERE project = $1 AND conversation_id = $2 AND item_id = $3
    RETURNING project, conversation_id, position, item_id
), recorded AS (
    INSERT INTO deleted_items (project, conversation_id, position, item_id) SELECT * FROM deleted RETURNING 1
)
SELECT count(*) FROM recorded
"""

# The statement for a page, and the position at which a list without `after` begins.
_LARGEST_POSITION = 2**63 - 1
PAGES = {"asc": (ASCEND, 0), "desc": (DESCEND, _LARGEST_POSITION)}


class PostgresConversations(PostgresDatabase, SqlConversations):
    @property
    def _work(self) -> ConversationWork:
        return _WORK

    async def list_items(
        self, project: str, conversation_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        if await self.load_conversation(project, conversation_id) is None:
            return None
        statement, position = PAGES[order]
        if after is not None:
            key = make_item_key(after)
            ((position,),) = await self._reader.submit(ITEM_POSITION, (project, conversation_id, key))
            if position is None:
                raise InvalidRequest(
                    f"The conversation has no item with id '{after}' to continue after.",
                    param="after",
                    code="invalid_value",
                )
        # One row more than requested shows that there are more.
        rows = await self._reader.submit(statement, (project, conversation_id, position, limit + 1))
        items = await self._unpack(conversation_id, rows[:limit])
        return ItemRows(items=items, has_more=len(rows) > limit)

    async def load_conversation_items(
        self, project: str, conversation_id: str, *, before: str | None = None
    ) -> list[Item | Unknown] | None:
        if await self.load_conversation(project, conversation_id) is None:
            return None
        position = _LARGEST_POSITION
        if before is not None:
            blocks = await self._reader.submit(BLOCK_POSITION, (project, conversation_id, before))
            position = blocks[0][0] if blocks else _LARGEST_POSITION
        rows = await self._reader.submit(BEFORE, (project, conversation_id, position))
        return await self._unpack(conversation_id, rows)

    async def _unpack(self, conversation_id: str, rows: Sequence[Sequence[bytes]]) -> list[Item | Unknown]:
        contents = [content for (content,) in rows]
        return await run_sized(measure_texts(contents), unpack_items, conversation_id, contents)

    async def load_item(self, project: str, conversation_id: str, item_id: str) -> Item | Unknown | None:
        parameters = (project, conversation_id, make_item_key(item_id), self._now())
        rows = await self._reader.submit(LOAD_ITEM, parameters)
        return unpack_items(conversation_id, rows[0])[0] if rows else None

    async def delete_item(self, project: str, conversation_id: str, item_id: str) -> bool:
        parameters = (project, conversation_id, make_item_key(item_id), self._now())
        deleted: bool = await self._writer.submit(_delete_item, parameters)
        return deleted


class TurnPlan(NamedTuple):
    """The items that a response appends to a conversation. `items` is None if they were appended before."""

    project: str
    conversation_id: str
    response_id: str | None
    items: list[ItemRecord] | None


async def load_for_update(connection: "Connection[Any]", project: str, conversation_id: str, now: float) -> Any:
    """Lock a conversation and return its row, or None if there is none."""
    return await connection.fetchrow(LOAD_FOR_UPDATE, project, conversation_id, now)


async def plan_turn(
    connection: "Connection[Any]",
    project: str,
    conversation_id: str,
    input_items: list[ItemRecord],
    output_items: list[ItemRecord],
    *,
    response_id: str | None = None,
) -> TurnPlan:
    """Choose the items to append, and their ids. The conversation must be locked. Nothing is written."""
    plan = TurnPlan(project, conversation_id, response_id, None)
    if response_id is not None and await connection.fetchval(HAS_BLOCK, project, conversation_id, response_id):
        return plan
    known: dict[str, bytes | None] = {}
    wanted = {item.id for item in (*input_items, *output_items) if item.id is not None}
    while True:
        known |= dict.fromkeys(wanted) | await _load_contents(connection, project, conversation_id, wanted)
        try:
            return plan._replace(items=arrange_turn(input_items, output_items, known.__getitem__))
        except KeyError as missing:  # a new id for an item whose own is taken
            wanted = {missing.args[0]}


async def write_turn(connection: "Connection[Any]", plan: TurnPlan, expires_at: int | None) -> None:
    """Append the items of a plan. With `expires_at`, the conversation expires no earlier than then."""
    key = plan.project, plan.conversation_id
    if expires_at is not None:
        await connection.execute(EXTEND_EXPIRY, expires_at, *key)
    if plan.items is None:
        return
    if plan.response_id is not None:
        await connection.execute(BEGIN_BLOCK, *key, plan.response_id)
    await _append(connection, *key, plan.items)


async def _append(
    connection: "Connection[Any]", project: str, conversation_id: str, items: Sequence[ItemRecord]
) -> None:
    if items:
        rows = [
            (project, conversation_id, None if item.id is None else make_item_key(item.id), item.content)
            for item in items
        ]
        await connection.executemany(APPEND, rows)


async def _load_contents(
    connection: "Connection[Any]", project: str, conversation_id: str, item_ids: Sequence[str] | set[str]
) -> dict[str, bytes]:
    if not item_ids:
        return {}
    ids = {make_item_key(item_id): item_id for item_id in item_ids}
    rows = await connection.fetch(CONTENTS, project, conversation_id, escape_all(ids))
    return {ids[key]: content for key, content in rows}


async def _append_items(
    connection: "Connection[Any]",
    project: str,
    conversation_id: str,
    items: list[ItemRecord],
    output: list[ItemRecord] | None,
    now: float,
    expires_at: int | None,
) -> bool:
    if await load_for_update(connection, project, conversation_id, now) is None:
        return False
    if output is not None:
        plan = await plan_turn(connection, project, conversation_id, items, output)
    else:
        await _check_new(connection, project, conversation_id, items)
        plan = TurnPlan(project, conversation_id, None, items)
    await write_turn(connection, plan, expires_at)
    return True


async def _check_new(
    connection: "Connection[Any]", project: str, conversation_id: str, items: Sequence[ItemRecord]
) -> None:
    """Raise InvalidRequest if the conversation has an item of the same id, or if two items have the same."""
    ids = [item.id for item in items if item.id is not None]
    taken = set(await _load_contents(connection, project, conversation_id, ids))
    for item_id in ids:
        if item_id in taken:
            raise InvalidRequest(
                f"The conversation '{conversation_id}' already has an item with id '{item_id}'.",
                param="items",
                code="invalid_value",
            )
        taken.add(item_id)


async def _create(connection: "Connection[Any]", row: Sequence[Any], items: list[ItemRecord]) -> None:
    project, conversation_id, *_ = row
    await _check_new(connection, project, conversation_id, items)
    await connection.execute(CREATE, *row)
    await _append(connection, project, conversation_id, items)


async def _update(
    connection: "Connection[Any]", project: str, conversation_id: str, metadata: bytes, now: float
) -> Any:
    row = await load_for_update(connection, project, conversation_id, now)
    if row is not None:
        await connection.execute(UPDATE, metadata, project, conversation_id)
    return row


async def _delete_item(
    connection: "Connection[Any]", project: str, conversation_id: str, item_id: str, now: float
) -> bool:
    if await load_for_update(connection, project, conversation_id, now) is None:
        return False
    deleted: int = await connection.fetchval(DELETE_ITEM, project, conversation_id, item_id)
    return deleted > 0


_WORK = ConversationWork(create=_create, load=LOAD, update=_update, delete=DELETE, append=_append_items)
