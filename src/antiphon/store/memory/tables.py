"""The tables of the memory store as dictionaries, and the event log and item references on them.

No method of the store waits, so each one is a transaction: it checks first and then changes.
"""

import bisect
import itertools
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import msgspec

from antiphon.errors import ServerError, StoreUnavailable, Unavailable
from antiphon.offload import run_sized
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.changes import OnChange
from antiphon.store.containers import ContainerFileRow, ContainerRow
from antiphon.store.event_batches import EventBatch, pack_events, take_events
from antiphon.store.history_budget import HistoryShare, reserve_items
from antiphon.store.keys import StoredKey
from antiphon.store.limits import DEFAULT_LIMITS, StoreLimits
from antiphon.store.peer_link import StorePeerLink
from antiphon.store.record import (
    ForeignItem,
    ItemRecord,
    ResponseRecord,
    group_by_response,
    measure_texts,
    unpack_item,
    unpack_items,
    unpack_named_items,
    unpack_output,
)
from antiphon.store.usage import LimitCounts, StoredProject, UsageRow
from antiphon.store.write_observer import OnWrite

Key = tuple[str, str]  # the project, and the id of a response, conversation or prompt


class ConversationRow(msgspec.Struct, kw_only=True):
    """A conversation. `items` are keyed by position, which is their order among the items of all conversations.

    `positions` has the position of each item id, `deleted` the positions of deleted items, and `blocks` the positions
    at which responses were appended, by response id.
    """

    created_at: int
    metadata: bytes
    expires_at: int | None
    items: dict[int, ItemRecord] = {}
    positions: dict[str, int] = {}
    deleted: dict[str, int] = {}
    blocks: dict[str, int] = {}


class RunRow(msgspec.Struct, kw_only=True):
    request: bytes
    model: str
    free_since: float
    owner: str | None = None
    leased_until: float = 0.0
    lease: float = 0.0
    attempt: int = 0
    interruptions: int = 0
    watched: bool = False
    cancelled: bool = False


class PromptRow(msgspec.Struct, kw_only=True):
    body: bytes
    created_at: int


class Tables(msgspec.Struct):
    """All tables. Dictionaries keep the order in which rows were inserted.

    `foreign` has, by response, the ids of the items that the response did not produce. `run_starts` has the times at
    which runs started in the last minute. `limit_counts` has counts with their time, by subject and process.
    """

    responses: dict[Key, ResponseRecord] = {}
    conversations: dict[Key, ConversationRow] = {}
    foreign: dict[Key, frozenset[str]] = {}
    events: dict[Key, list[EventBatch]] = {}
    runs: dict[Key, RunRow] = {}
    run_starts: list[float] = []
    prompts: dict[Key, dict[str, PromptRow]] = {}
    hosted_steps: dict[Key, list[bytes]] = {}
    effect_claims: dict[Key, int | None] = {}
    api_keys: dict[str, StoredKey] = {}
    projects: dict[str, StoredProject] = {}
    usage: dict[tuple[int, str, str, str], UsageRow] = {}
    usage_months: dict[tuple[int, str, str], tuple[int, float]] = {}
    limit_counts: dict[tuple[str, str], tuple[LimitCounts, float]] = {}
    containers: dict[Key, ContainerRow] = {}
    container_files: dict[Key, dict[str, ContainerFileRow]] = {}
    container_runs: dict[Key, tuple[str, float]] = {}
    next_positions: Iterator[int] = msgspec.field(default_factory=itertools.count)


class MemoryTables:
    """Base of the parts of the memory store. `now` is the clock for expiry and leases."""

    def __init__(self, *, now: Callable[[], float] = time.time, limits: StoreLimits = DEFAULT_LIMITS) -> None:
        self._now = now
        self._limits = limits
        self.configuration_id = secrets.token_hex(16)
        self.on_change: OnChange | None = None
        self.on_write: OnWrite | None = None  # never called: nothing is written to a disk
        self._open_tables: Tables | None = None

    failure: StoreUnavailable | None = None
    reports_changes = False
    peer_link: StorePeerLink | None = None

    async def check(self) -> None:
        _ = self._tables  # raises Unavailable unless the store is open

    async def open(self) -> None:
        self._open_tables = Tables()

    async def close(self) -> None:
        self._open_tables = None

    @property
    def _tables(self) -> Tables:
        if self._open_tables is None:
            raise Unavailable("The store is not open.")
        return self._open_tables

    def _is_live(self, row: ResponseRecord | ConversationRow) -> bool:
        return row.expires_at is None or row.expires_at > self._now()

    def _is_owned(self, key: Key, owner: str) -> bool:
        run = self._tables.runs.get(key)
        return run is not None and run.owner == owner


class MemoryEventLog(MemoryTables):
    async def append_events(
        self, project: str, response_id: str, first: int, payloads: Sequence[bytes], *, owner: str | None = None
    ) -> bool:
        key = project, response_id
        batches = pack_events(first, payloads)
        is_allowed = key in self._tables.responses if owner is None else self._is_owned(key, owner)
        if is_allowed and batches:
            self._check_number(key, batches)
            self._tables.events.setdefault(key, []).extend(batches)
        return is_allowed

    async def read_events(
        self, project: str, response_id: str, after: int, *, max_bytes: int | None = None
    ) -> list[tuple[int, bytes]]:
        batches = self._tables.events.get((project, response_id), [])
        start = bisect.bisect_right(batches, after, key=lambda batch: batch.last)
        unread = ((batch.last, batch.lines) for batch in itertools.islice(batches, start, None))
        return take_events(unread, after, max_bytes)

    async def search_events(
        self, project: str, response_id: str, text: bytes, *, start: int
    ) -> list[tuple[int, bytes]]:
        batches = self._tables.events.get((project, response_id), [])
        first = bisect.bisect_left(batches, start, key=lambda batch: batch.last)
        return [
            (batch.last, batch.lines)
            for batch in batches[first:]
            if batch.last == start or batch is batches[-1] or text in batch.lines
        ]

    async def drop_events(self, project: str, response_id: str, *, owner: str | None = None) -> bool:
        key = project, response_id
        if owner is not None and (not self._is_owned(key, owner) or self._tables.runs[key].watched):
            return False
        self._tables.events.pop(key, None)
        return True

    def _check_number(self, key: Key, batches: list[EventBatch]) -> None:
        stored = self._tables.events.get(key)
        if stored and batches and stored[-1].last >= batches[0].first:
            raise ServerError(f"The event log of {key[1]} already reaches number {batches[0].first}.")


class MemoryReferences(MemoryTables):
    async def load_outputs(
        self, project: str, response_ids: Sequence[str], *, share: HistoryShare | None = None
    ) -> list[Item | Unknown]:
        found = (self._tables.responses.get((project, each)) for each in response_ids)
        live = [record for record in found if record is not None and self._is_live(record)]
        if share is not None:
            await share.reserve(measure_texts(record.output for record in live))
        return [item for record in live for item in unpack_output(record.id, record.output)]

    async def load_items(
        self, project: str, item_ids: Collection[str], *, share: HistoryShare | None = None
    ) -> dict[str, Item | Unknown]:
        found: dict[str, Item | Unknown] = {}
        for response_id, wanted in group_by_response(item_ids).items():
            record = self._tables.responses.get((project, response_id))
            if record is not None and self._is_live(record):
                found |= await reserve_items(await self._unpack_named(record, wanted, lossless=True), share)
        rest = {item_id for item_id in item_ids if item_id not in found}
        for key, record in reversed(tuple(self._tables.responses.items())):
            wanted = rest & self._tables.foreign.get(key, frozenset()) if key[0] == project else set()
            if wanted and self._is_live(record):
                found |= await reserve_items(await self._unpack_named(record, wanted), share)
                rest -= wanted
        for item_id in rest:
            if (item := self._find_in_conversations(project, item_id)) is not None:
                found |= await reserve_items({item_id: item}, share)
        return found

    async def _unpack_named(
        self, record: ResponseRecord, wanted: Collection[str], *, lossless: bool = False
    ) -> dict[str, Item | Unknown]:
        unpack = partial(unpack_named_items, wanted, lossless=lossless)
        return await run_sized(len(record.input) + len(record.output), unpack, record.id, record.input, record.output)

    async def find_item(self, project: str, item_id: str) -> Item | Unknown | None:
        for key, record in reversed(self._tables.responses.items()):
            if key[0] == project and item_id in self._tables.foreign.get(key, ()) and self._is_live(record):
                return unpack_item(item_id, record.id, record.input, record.output)
        return self._find_in_conversations(project, item_id)

    def _find_in_conversations(self, project: str, item_id: str) -> Item | Unknown | None:
        found = [
            (row.positions[item_id], conversation_id, row)
            for (owner, conversation_id), row in self._tables.conversations.items()
            if owner == project and item_id in row.positions and self._is_live(row)
        ]
        if not found:
            return None
        position, conversation_id, row = max(found)
        return unpack_items(conversation_id, [row.items[position].content])[0]

    def _index_items(self, key: Key, foreign: list[ForeignItem]) -> None:
        """Replace the index of the foreign items of a response that has just been written.

        Items produced by a stored response are not indexed: they are found in that response and deleted with it.
        """
        project, _ = key
        responses = self._tables.responses
        self._tables.foreign[key] = frozenset(
            each.item_id for each in foreign if each.source is None or (project, each.source) not in responses
        )
