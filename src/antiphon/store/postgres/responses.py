"""Responses in PostgreSQL, their expiry, and the locations of their items.

Triggers of the schema delete the run of a final response, and the run and the events of a deleted one.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from antiphon.errors import NotFound, ServerError
from antiphon.offload import LARGE_BYTES
from antiphon.store.base import LeaseLost
from antiphon.store.postgres.connection import CONFLICTS, escape_all, make_item_key
from antiphon.store.postgres.conversations import TurnPlan, load_for_update, plan_turn, write_turn
from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.postgres.events import HOLD, append_batches, find_missing
from antiphon.store.postgres.hosted_steps import EXPIRE_CLAIMS
from antiphon.store.postgres.writer import GroupedStatement
from antiphon.store.record import EventBatch, ForeignItem, ItemRecord
from antiphon.store.sql_responses import LocatedItem, ResponseStatements, SqlResponses

if TYPE_CHECKING:
    from asyncpg import Connection

# Number of expired responses or conversations deleted in one transaction, so that others wait only briefly.
EXPIRY_STEP = 100

INSERT = """
INSERT INTO responses (project, id, previous_response_id, created_at, final, expires_at, input, output, body)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
"""

SAVE = GroupedStatement(
    f"""
WITH saved AS (
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
    RETURNING 1
)
SELECT count(*) FROM saved
""",
    is_idempotent=True,
)

# A response is not saved again with an unfinished status after its final one.
LOCK = "SELECT final FROM responses WHERE project = $1 AND id = $2 FOR UPDATE"

_LIVE = "FROM responses WHERE project = $1 AND id = $2 AND (expires_at IS NULL OR expires_at > $3::float8)"

# Only the newest response must not have expired. The body is read only for the oldest response and for the response
# whose tools are requested. A cycle in a damaged database repeats its rows up to the limit.
CHAIN = """
WITH RECURSIVE walked (id, previous, depth) AS (
    SELECT id, previous_response_id, 1 FROM responses
    WHERE project = $1 AND id = $2 AND (expires_at IS NULL OR expires_at > $3::float8)
    UNION ALL
    SELECT older.id, older.previous_response_id, depth + 1
    FROM walked JOIN responses AS older ON older.project = $1 AND older.id = walked.previous
    WHERE depth < $4::integer
)
SELECT walked.id, previous, final, input, output, CASE WHEN previous IS NULL OR walked.id = $5::text THEN body END,
    coalesce((SELECT revision FROM revisions WHERE revisions.project = $6), 0)
FROM walked JOIN responses ON responses.project = $1 AND responses.id = walked.id
"""

LOCATE_IN_RESPONSE = """
SELECT responses.id FROM foreign_items JOIN responses
    ON responses.project = foreign_items.project AND responses.id = response_id
WHERE foreign_items.project = $1 AND item_id = $2 AND (expires_at IS NULL OR expires_at > $3::float8)
ORDER BY responses.position DESC LIMIT 1
"""

FIND_IN_CONVERSATION = """
SELECT conversation_id, content FROM items JOIN conversations
    ON conversations.project = items.project AND conversations.id = items.conversation_id
WHERE items.project = $1 AND item_id = $2 AND (expires_at IS NULL OR expires_at > $3::float8)
ORDER BY items.position DESC LIMIT 1
"""

LOCATE_ALL_IN_RESPONSES = """
SELECT DISTINCT ON (item_id) item_id, responses.id FROM foreign_items JOIN responses
    ON responses.project = foreign_items.project AND responses.id = response_id
WHERE foreign_items.project = $1 AND item_id = ANY ($2::text[]) AND (expires_at IS NULL OR expires_at > $3::float8)
ORDER BY item_id, responses.position DESC
"""

FIND_ALL_IN_CONVERSATIONS = """
SELECT DISTINCT ON (item_id) item_id, conversation_id, content FROM items JOIN conversations
    ON conversations.project = items.project AND conversations.id = items.conversation_id
WHERE items.project = $1 AND item_id = ANY ($2::text[]) AND (expires_at IS NULL OR expires_at > $3::float8)
ORDER BY item_id, items.position DESC
"""

LOAD_OUTPUTS = """
SELECT id, output FROM responses
WHERE project = $1 AND id = ANY ($2::text[]) AND (expires_at IS NULL OR expires_at > $3::float8)
"""

_IS_SMALL = f"octet_length(input) + octet_length(output) <= {LARGE_BYTES}"

STATEMENTS = ResponseStatements(
    load=f"SELECT expires_at, input, output, body {_LIVE}",
    load_response=f"SELECT body, output {_LIVE}",
    load_body=f"SELECT body {_LIVE}",
    load_input=f"SELECT input {_LIVE}",
    load_small_input=f"SELECT CASE WHEN octet_length(input) <= {LARGE_BYTES} THEN input END {_LIVE}",
    load_input_part=f"SELECT substr(input, $4::integer + 1, $5::integer) {_LIVE}",
    load_items=f"SELECT input, output {_LIVE}",
    load_small_items=f"SELECT CASE WHEN {_IS_SMALL} THEN input END, CASE WHEN {_IS_SMALL} THEN output END {_LIVE}",
    chain=CHAIN,
    find_in_response=LOCATE_IN_RESPONSE.replace("SELECT responses.id FROM", "SELECT responses.id, input, output FROM"),
    find_in_conversation=FIND_IN_CONVERSATION,
)

DELETE = GroupedStatement(
    f"WITH deleted AS (DELETE {_LIVE} RETURNING 1) SELECT count(*) FROM deleted",
)

# Items produced by a stored response are not indexed: they are found in that response and deleted with it.
INDEX_ITEM = """
INSERT INTO foreign_items (project, response_id, item_id) SELECT $1, $2, $3
WHERE NOT EXISTS (SELECT 1 FROM responses WHERE project = $1 AND id = $4)
ON CONFLICT DO NOTHING
"""

# Expired responses with the ids of the responses that continue them. The last response of a chain comes first. A row
# comes after the row that it continues. Others do not count: a cycle in a damaged database would never expire.
DUE = """
SELECT project, id, ARRAY(
    SELECT newer.id FROM responses AS newer
    WHERE newer.project = due.project AND newer.previous_response_id = due.id AND newer.position > due.position
) FROM responses AS due WHERE expires_at <= $1 AND NOT continued
ORDER BY expires_at DESC, position DESC LIMIT $2 FOR UPDATE SKIP LOCKED
"""

DELETE_EXPIRED = "DELETE FROM responses WHERE project = $1 AND id = $2"

MARK_CONTINUED = "UPDATE responses SET continued = true WHERE project = $1 AND id = $2"

# True for one process at a time, until the end of its transaction.
SWEEP_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('antiphon expiry ' || current_schema(), 0))"

EXPIRE_CONVERSATIONS = """
DELETE FROM conversations WHERE (project, id) IN (
    SELECT project, id FROM conversations WHERE expires_at <= $1 LIMIT $2 FOR UPDATE SKIP LOCKED
)
"""


class PostgresResponses(PostgresDatabase, SqlResponses):
    _statements = STATEMENTS

    async def _submit(self, row: Sequence[Any], *related: Any) -> None:
        if not related:
            await self._writer.submit(SAVE, row)
            return
        _, owner, batches, *_ = related
        first = batches[0].first if batches else -1
        with self._uncertain.track(row[0], row[1], first) as is_repeated:
            await self._writer.submit(_save_with_related, (row, *related, self._now(), is_repeated))
        if owner is not None:
            self._notifications.announce("events", row[1])

    async def delete(self, project: str, response_id: str) -> bool:
        deleted: int = await self._writer.submit(DELETE, (project, response_id, self._now()))
        if deleted:
            self._notifications.announce("events", response_id)
        return deleted > 0

    async def expire(self, now: int) -> int:
        expired = 0
        checked = EXPIRY_STEP
        while checked:  # a deleted response may have been the last that continued an expired one
            checked, deleted = await self._sweep(_delete_expired, now)
            expired += deleted
        deleted = EXPIRY_STEP
        while deleted == EXPIRY_STEP:
            _, deleted = await self._sweep(_delete_conversations, now)
            expired += deleted
        await self._sweep(_delete_claims, now)
        return expired

    async def _sweep(
        self, step: "Callable[[Connection[Any], int], Awaitable[tuple[int, int]]]", now: int
    ) -> tuple[int, int]:
        """Return how many rows were checked and deleted. Both are 0 while another process deletes expired rows."""
        try:
            async with self._reader.transact() as connection:
                return await step(connection, now) if await connection.fetchval(SWEEP_LOCK) else (0, 0)
        except ServerError as error:
            if isinstance(error.__cause__, CONFLICTS):  # the next sweep deletes them
                return 0, 0
            raise

    async def _locate_items(self, project: str, item_ids: Sequence[str]) -> Sequence[LocatedItem]:
        keys = {make_item_key(item_id): item_id for item_id in item_ids}
        parameters = (project, escape_all(keys), self._now())
        in_responses = await self._reader.submit(LOCATE_ALL_IN_RESPONSES, parameters)
        located = [LocatedItem(keys.pop(key), response_id) for key, response_id in in_responses]
        if keys:
            parameters = (project, escape_all(keys), self._now())
            rows = await self._reader.submit(FIND_ALL_IN_CONVERSATIONS, parameters)
            located += [LocatedItem(keys[key], None, conversation, content) for key, conversation, content in rows]
        return located

    def _make_item_key(self, item_id: str) -> str:
        return make_item_key(item_id)

    async def _read_outputs(self, project: str, response_ids: Sequence[str]) -> Sequence[tuple[str, bytes]]:
        rows = await self._reader.submit(LOAD_OUTPUTS, (project, escape_all(response_ids), self._now()))
        found = dict(rows)
        return [(response_id, found[response_id]) for response_id in response_ids if response_id in found]


def count_rows(status: str) -> int:
    """Return the number of rows that a statement has changed, from its command tag, such as `DELETE 3`."""
    return int(status.rpartition(" ")[2])


async def index_items(
    connection: "Connection[Any]", project: str, response_id: str, foreign: Sequence[ForeignItem]
) -> None:
    """Index the foreign items of a response that has just been written."""
    if foreign:
        rows = [(project, response_id, make_item_key(each.item_id), each.source) for each in foreign]
        await connection.executemany(INDEX_ITEM, rows)


async def _save_with_related(
    connection: "Connection[Any]",
    row: Sequence[Any],
    foreign: list[ForeignItem],
    owner: str | None,
    batches: list[EventBatch],
    conversation: str | None,
    items: tuple[list[ItemRecord], list[ItemRecord]],
    now: float,
    is_repeated: bool,  # noqa: FBT001 - the writer passes parameters by position
) -> None:
    """Save a response with its events and conversation items. With an owner, check that it has the run."""
    project, response_id, _, _, is_final, expires_at, *_ = row
    if owner is not None and await connection.fetchval(HOLD, project, response_id, owner) is None:
        raise LeaseLost(f"{owner} does not own the run of {response_id}.")
    if not is_final and await connection.fetchval(LOCK, project, response_id):
        return
    missing = await find_missing(connection, project, response_id, batches, is_repeated=is_repeated)
    plan: TurnPlan | None = None
    if conversation is not None:
        if await load_for_update(connection, project, conversation, now) is None:
            raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")
        plan = await plan_turn(connection, project, conversation, *items, response_id=response_id)
    await connection.fetchval(SAVE.text, *row)
    await index_items(connection, project, response_id, foreign)
    await append_batches(connection, project, response_id, missing)
    if plan is not None:
        await write_turn(connection, plan, expires_at)


async def _delete_expired(connection: "Connection[Any]", now: int) -> tuple[int, int]:
    """Delete the next expired responses that none continues. Return how many were checked, and how many deleted."""
    due = await connection.fetch(DUE, now, EXPIRY_STEP)
    deleted: set[tuple[str, str]] = set()
    left = [((project, response_id), newer) for project, response_id, newer in due]
    # Deleting a response can make the one that it continued the last of its chain.
    while True:
        last = {key for key, newer in left if all((key[0], each) in deleted for each in newer)}
        if not last:
            break
        deleted |= last
        left = [(key, newer) for key, newer in left if key not in last]
    await connection.executemany(DELETE_EXPIRED, sorted(deleted))
    await connection.executemany(MARK_CONTINUED, [key for key, _ in left])
    return len(due), len(deleted)


async def _delete_conversations(connection: "Connection[Any]", now: int) -> tuple[int, int]:
    deleted = count_rows(await connection.execute(EXPIRE_CONVERSATIONS, now, EXPIRY_STEP))
    return deleted, deleted


async def _delete_claims(connection: "Connection[Any]", now: int) -> tuple[int, int]:
    deleted = count_rows(await connection.execute(EXPIRE_CLAIMS, now))
    return deleted, deleted
