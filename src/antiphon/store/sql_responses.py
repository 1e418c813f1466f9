"""Reading of responses and of references to their items, shared by the SQL stores. Each has its own statements."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from antiphon.offload import LARGE_BYTES, is_large, mark_large, run_in_thread, run_sized
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, Link, Order, StoredResponse
from antiphon.store.chain_cache import ChainCache
from antiphon.store.item_offsets import ItemOffsets, OffsetCache, build_offsets
from antiphon.store.record import (
    Chain,
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
    unpack_slice,
    walk_chain,
)

T = TypeVar("T")

# Number of references that are searched at once, so that other readers wait only briefly.
ITEMS_STEP = 200

# Number of links to read first, and the factor by which it grows while the link before them is not in the cache:
# another process may have added the newest links.
FIRST_LINKS = 2
LINKS_GROWTH = 32


class ResponseStatements(NamedTuple):
    """The queries of `SqlResponses`. The parameters of each begin with the project and an id, and then the time.

    `chain` has as further parameters the maximum number of rows, the id of the response whose body is read, and the
    project. Its rows have the fields of a `LinkRecord` and the revision of the project. `load_small_input` and
    `load_small_items` have NULL instead of large values. `load_input_part` has a start and a length.
    """

    load: str
    load_response: str
    load_body: str
    load_input: str
    load_small_input: str
    load_input_part: Any
    load_items: str
    load_small_items: str
    chain: str
    find_in_response: str
    find_in_conversation: str


class RowReader(Protocol):
    def submit(self, statement: str, parameters: Sequence[object], /) -> Awaitable[list[Any]]:
        """Return the rows of a query."""


class LocatedItem(NamedTuple):
    """An item that was found in the response `response_id`, or in a conversation, with its content."""

    item_id: str
    response_id: str | None
    conversation_id: str = ""
    content: bytes = b""


class SqlResponses:
    """Base of the classes that store responses by SQL."""

    _statements: ResponseStatements
    _now: Callable[[], float]
    _reads: asyncio.Semaphore
    _chain_cache: ChainCache
    _offsets: OffsetCache

    @property
    @abstractmethod
    def _reader(self) -> RowReader: ...

    @abstractmethod
    def _submit(self, row: Sequence[Any], *related: Any) -> Awaitable[None]:
        """Write the result of `_pack`."""

    @abstractmethod
    async def _locate_items(self, project: str, item_ids: Sequence[str]) -> Sequence[LocatedItem]:
        """Find items that the responses named in their ids do not have."""

    @abstractmethod
    async def _read_outputs(self, project: str, response_ids: Sequence[str]) -> Sequence[tuple[str, bytes]]:
        """Return the id and the encoded output of the responses that exist, in the given order."""

    def _make_item_key(self, item_id: str) -> str:
        """Return the value of the columns `item_id` for an item."""
        return item_id

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

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        rows = await self._reader.submit(self._statements.load, (project, response_id, self._now()))
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
            statements = self._statements
            found = await self._unpack_arrays(
                project,
                response_id,
                unpack,
                small=statements.load_small_input,
                whole=statements.load_input,
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
        parameters = (project, response_id, self._now(), page.start, page.end - page.start)
        rows = await self._reader.submit(self._statements.load_input_part, parameters)
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
        """Return the result of a function of arrays of a response, or None if there is no response.

        Few large arrays are in memory at once, however many requests need one. Small ones do not wait for them. `find`
        returns the result if another request has computed it meanwhile.
        """
        parameters = (project, response_id, self._now())
        rows = await self._reader.submit(small, parameters)
        if rows and None in tuple(rows[0]):
            async with self._reads:
                if (found := find()) is not None:
                    return found
                rows = await self._reader.submit(whole, parameters)
                return await run_sized(_measure(rows), unpack, *rows[0]) if rows else None
        return unpack(*rows[0]) if rows else None

    async def _load_named_items(
        self, project: str, response_id: str, item_ids: Collection[str], *, lossless: bool = False
    ) -> dict[str, Item | Unknown]:
        unpack = partial(unpack_named_items, item_ids, response_id, lossless=lossless)
        statements = self._statements
        found = await self._unpack_arrays(
            project, response_id, unpack, small=statements.load_small_items, whole=statements.load_items
        )
        return found or {}

    async def load_response(self, project: str, response_id: str) -> Response | None:
        # The rows of many requests must not be in memory at once: each can be large.
        async with self._reads:
            rows = await self._reader.submit(self._statements.load_response, (project, response_id, self._now()))
            return await run_sized(_measure(rows), unpack_bare_response, response_id, *rows[0]) if rows else None

    async def load_bare_response(self, project: str, response_id: str) -> Response | None:
        rows = await self._reader.submit(self._statements.load_body, (project, response_id, self._now()))
        return unpack_bare_response(response_id, *rows[0]) if rows else None

    async def load_chain(self, project: str, response_id: str, *, with_tools: bool = False) -> list[Link]:
        now, with_body = self._now(), response_id if with_tools else None
        limit = FIRST_LINKS
        while True:
            # Each statement reads the chain from its newest response, so each result is one snapshot.
            parameters = (project, response_id, now, limit, with_body, project)
            rows = await self._reader.submit(self._statements.chain, parameters)
            if not rows:
                return []
            records = {row[0]: LinkRecord(*row[:-1]) for row in rows}
            chain = await self._build_chain(project, response_id, records, revision=rows[0][-1])
            if chain.next_id is None or len(records) < limit:
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

    async def load_outputs(self, project: str, response_ids: Sequence[str]) -> list[Item | Unknown]:
        outputs = await self._read_outputs(project, response_ids)
        return await run_sized(_measure(outputs), _unpack_outputs, outputs)

    async def load_items(self, project: str, item_ids: Collection[str]) -> dict[str, Item | Unknown]:
        found: dict[str, Item | Unknown] = {}
        for response_id, wanted in group_by_response(item_ids).items():
            found |= await self._load_named_items(project, response_id, wanted, lossless=True)
        rest = [item_id for item_id in item_ids if item_id not in found]
        for start in range(0, len(rest), ITEMS_STEP):
            located = await self._locate_items(project, rest[start : start + ITEMS_STEP])
            found |= await self._load_located(project, located)
        return found

    async def _load_located(self, project: str, located: Sequence[LocatedItem]) -> dict[str, Item | Unknown]:
        """Load the items that `_locate_items` has found, each response once."""
        found: dict[str, Item | Unknown] = {}
        by_response: dict[str, set[str]] = {}
        for item_id, response_id, conversation_id, content in located:
            if response_id is not None:
                by_response.setdefault(response_id, set()).add(item_id)
            else:
                found[item_id] = unpack_items(conversation_id, [content])[0]
        for response_id, wanted in by_response.items():
            found |= await self._load_named_items(project, response_id, wanted)
        return found

    async def find_item(self, project: str, item_id: str) -> Item | Unknown | None:
        parameters = (project, self._make_item_key(item_id), self._now())
        rows = await self._reader.submit(self._statements.find_in_response, parameters)
        if rows:
            return await run_sized(_measure(rows), unpack_item, item_id, *rows[0])
        rows = await self._reader.submit(self._statements.find_in_conversation, parameters)
        return unpack_items(rows[0][0], rows[0][1:])[0] if rows else None


def _pack(
    project: str,
    stored: StoredResponse,
    conversation: str | None,
    owner: str | None,
    events: tuple[int, Sequence[bytes]] | None,
) -> Sequence[Any]:
    """Return the row of a response. If it has related rows, return also the other arguments of `_submit`."""
    row = (project, *pack_response(stored))
    foreign = find_foreign_items(stored)
    if conversation is None and owner is None and events is None and not foreign:
        return (row,)
    batches = [] if events is None else pack_events(*events)
    items = ([], []) if conversation is None else (pack_items(stored.input), pack_items(stored.response.output))
    return row, foreign, owner, batches, conversation, items


def _measure(rows: Iterable[Sequence[Any]]) -> int:
    """Return the number of bytes in the rows."""
    return sum(len(value) for row in rows for value in row if isinstance(value, bytes))


def _unpack_outputs(outputs: Iterable[tuple[str, bytes]]) -> list[Item | Unknown]:
    return [item for output in outputs for item in unpack_output(*output)]
