"""References to stored items, shared by the SQL stores."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from antiphon.offload import run_sized
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.history_budget import UNRESERVED_BYTES, HistoryShare, reserve_items
from antiphon.store.record import group_by_response, measure_texts, unpack_items, unpack_output
from antiphon.store.sql_responses import SqlResponses
from antiphon.store.sql_steps import SqlStep, Steps, Variants

# Number of references that are searched at once, so that other readers wait only briefly.
ITEMS_STEP = 200

# The newest responses that have these items, which they did not produce.
LOCATE_IN_RESPONSES = Variants(
    sqlite="""
SELECT item_id, id FROM (
    SELECT item_id, max(responses.rowid) AS number FROM foreign_items JOIN responses
        ON responses.project = foreign_items.project AND responses.id = response_id
    WHERE foreign_items.project = ? AND item_id IN TEXTS(?) AND (expires_at IS NULL OR expires_at > ?)
    GROUP BY item_id
) AS located JOIN responses ON responses.rowid = number
""",
    postgres="""
SELECT DISTINCT ON (item_id) item_id, responses.id FROM foreign_items JOIN responses
    ON responses.project = foreign_items.project AND responses.id = response_id
WHERE foreign_items.project = ? AND item_id IN TEXTS(?) AND (expires_at IS NULL OR expires_at > ?)
ORDER BY item_id, responses.position DESC
""",
)

# The newest items of conversations with these ids.
FIND_IN_CONVERSATIONS = Variants(
    sqlite="""
SELECT items.item_id, conversation_id, content FROM (
    SELECT item_id, max(position) AS number FROM items JOIN conversations
        ON conversations.project = items.project AND conversations.id = items.conversation_id
    WHERE items.project = ? AND item_id IN TEXTS(?) AND (expires_at IS NULL OR expires_at > ?)
    GROUP BY item_id
) AS located JOIN items ON items.position = number
""",
    postgres="""
SELECT DISTINCT ON (item_id) item_id, conversation_id, content FROM items JOIN conversations
    ON conversations.project = items.project AND conversations.id = items.conversation_id
WHERE items.project = ? AND item_id IN TEXTS(?) AND (expires_at IS NULL OR expires_at > ?)
ORDER BY item_id, items.position DESC
""",
)

_LIVE_RESPONSES = "FROM responses WHERE project = ? AND id IN TEXTS(?) AND (expires_at IS NULL OR expires_at > ?)"

MEASURE_OUTPUTS = f"SELECT id, length(output) {_LIVE_RESPONSES}"

LOAD_OUTPUTS = f"SELECT id, output {_LIVE_RESPONSES}"


class LocatedItem(NamedTuple):
    """An item that was found in the response `response_id`, or in a conversation, with its content."""

    item_id: str
    response_id: str | None
    conversation_id: str = ""
    content: bytes = b""


class SqlReferences(SqlResponses):
    """Base of the classes that find items by SQL."""

    async def load_outputs(
        self, project: str, response_ids: Sequence[str], *, share: HistoryShare | None = None
    ) -> list[Item | Unknown]:
        items: list[Item | Unknown] = []
        rest = response_ids
        while rest:
            outputs, rest = await self._read(_read_outputs, project, rest, int(self._now()))
            size = measure_texts(output for _, output in outputs)
            if share is not None:
                await share.reserve(size)
            items += await run_sized(size, _unpack_outputs, outputs)
        return items

    async def load_items(
        self, project: str, item_ids: Collection[str], *, share: HistoryShare | None = None
    ) -> dict[str, Item | Unknown]:
        found: dict[str, Item | Unknown] = {}
        for response_id, wanted in group_by_response(item_ids).items():
            named = await self._load_named_items(project, response_id, wanted, lossless=True)
            found |= await reserve_items(named, share)
        rest = [item_id for item_id in item_ids if item_id not in found]
        for start in range(0, len(rest), ITEMS_STEP):
            located = await self._read(self._locate_items, project, rest[start : start + ITEMS_STEP], int(self._now()))
            found |= await self._load_located(project, located, share)
        return found

    async def _load_located(
        self, project: str, located: Sequence[LocatedItem], share: HistoryShare | None
    ) -> dict[str, Item | Unknown]:
        """Load the items that `_locate_items` has found, each response once."""
        found: dict[str, Item | Unknown] = {}
        by_response: dict[str, set[str]] = {}
        for item_id, response_id, conversation_id, content in located:
            if response_id is not None:
                by_response.setdefault(response_id, set()).add(item_id)
            else:
                size = measure_texts((content,))
                (found[item_id],) = await run_sized(size, unpack_items, conversation_id, [content])
        await reserve_items(found, share)
        for response_id, wanted in by_response.items():
            found |= await reserve_items(await self._load_named_items(project, response_id, wanted), share)
        return found

    async def find_item(self, project: str, item_id: str) -> Item | Unknown | None:
        located = await self._read(self._locate_items, project, [item_id], int(self._now()))
        return (await self._load_located(project, located, None)).get(item_id)

    def _locate_items(self, project: str, item_ids: Sequence[str], now: int) -> Steps[list[LocatedItem]]:
        """Find items that the responses named in their ids do not have."""
        keys = {self._make_item_key(item_id): item_id for item_id in item_ids}
        rows = yield SqlStep(LOCATE_IN_RESPONSES, (project, list(keys), now))
        located = [LocatedItem(keys.pop(key), response_id) for key, response_id in rows]
        if keys:
            rows = yield SqlStep(FIND_IN_CONVERSATIONS, (project, list(keys), now))
            located += [LocatedItem(keys[key], None, conversation, content) for key, conversation, content in rows]
        return located


def _read_outputs(
    project: str, response_ids: Sequence[str], now: int
) -> Steps[tuple[list[tuple[str, bytes]], Sequence[str]]]:
    """Return the id and the encoded output of the responses that exist, in the given order.

    If they are large together, return only the first of them, and the ids of the others.
    """
    sizes = dict((yield SqlStep(MEASURE_OUTPUTS, (project, response_ids, now))))
    wanted: list[str] = []
    size = 0
    rest: Sequence[str] = ()
    for index, response_id in enumerate(response_ids):
        if size > UNRESERVED_BYTES:
            rest = response_ids[index:]
            break
        if response_id in sizes:
            wanted.append(response_id)
            size += sizes[response_id]
    outputs = dict((yield SqlStep(LOAD_OUTPUTS, (project, wanted, now)))) if wanted else {}
    return [(response_id, outputs[response_id]) for response_id in wanted if response_id in outputs], rest


def _unpack_outputs(outputs: Iterable[tuple[str, bytes]]) -> list[Item | Unknown]:
    return [item for output in outputs for item in unpack_output(*output)]
