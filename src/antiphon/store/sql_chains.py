"""Chains of responses, shared by the SQL stores: the newest links are read, and older ones are in a cache."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

from antiphon.offload import LARGE_BYTES, mark_large, run_sized
from antiphon.store.base import Link
from antiphon.store.chain_cache import ChainCache, measure_link
from antiphon.store.history_budget import UNLIMITED, UNRESERVED_BYTES, HistoryShare
from antiphon.store.record import (
    ChainWalk,
    LinkRecord,
    add_tools,
    finish_chain,
    measure_records,
    unpack_links,
    walk_chain,
)
from antiphon.store.sql_responses import LOAD_BODY
from antiphon.store.sql_steps import StepDatabase, Variants

# Number of links to read first, and the factor by which it grows while the link before them is not in the cache:
# another process may have added the newest links.
FIRST_LINKS = 2
LINKS_GROWTH = 32

# Only the newest response must not have expired. The recursive part reads only keys and lengths. Rows after the maximum
# number of bytes have NULL instead of values. The order of the result is undefined; walk_chain() restores it. A cycle
# in a damaged database repeats its rows up to the limit. The body is read only for the oldest response, because only a
# response that continues none can belong to a conversation, and for the response whose tools are requested.
_SIZE = """(CAST(length(older.input) AS bigint) + length(older.output)
    + CASE WHEN older.previous_response_id IS NULL OR older.id = ?5 THEN length(older.body) ELSE 0 END)"""
_CHAIN = f"""
WITH RECURSIVE walked (id, previous, number, depth, size, total) AS (
    SELECT id, previous_response_id, rowid, 1, {_SIZE}, {_SIZE} FROM responses AS older
    WHERE project = ?1 AND id = ?2 AND (expires_at IS NULL OR expires_at > ?3)
    UNION ALL
    SELECT older.id, older.previous_response_id, older.rowid, depth + 1, {_SIZE}, total + {_SIZE}
    FROM walked JOIN responses AS older ON older.project = ?1 AND older.id = walked.previous
    WHERE depth < ?4
)
SELECT walked.id, previous, final,
    CASE WHEN total <= ?6 THEN input END, CASE WHEN total <= ?6 THEN output END,
    CASE WHEN total <= ?6 AND (previous IS NULL OR walked.id = ?5) THEN body END, size, total <= ?6,
    coalesce((SELECT revision FROM revisions WHERE revisions.project = ?1), 0)
FROM walked JOIN responses ON """
CHAIN = Variants(
    sqlite=f"{_CHAIN} responses.rowid = number",
    postgres=f"{_CHAIN} responses.project = ?1 AND responses.id = walked.id",  # its positions have no index
)


class _WalkedChain(NamedTuple):
    """The rows of a chain, the walk through them, and the memory of the links that were in the cache.

    `missing` are the rows of the links that are not in memory.
    """

    walk: ChainWalk
    records: dict[str, LinkRecord]
    missing: list[LinkRecord]
    revision: int
    bytes_found: int
    with_tools: bool

    async def reserve(self, share: HistoryShare) -> None:
        """Reserve the memory of the links, before large ones are read."""
        # Shared links count once. The copies that are made of them count for each request.
        size = sum(record.size for record in self.missing)
        await share.reserve(size, decoded=self.bytes_found + share.shared_size)


class SqlChains(StepDatabase):
    """Base of the classes that read chains by SQL."""

    _large_reads: asyncio.Lock
    _chain_locks: WeakValueDictionary[tuple[str, str], asyncio.Lock]
    _chain_cache: ChainCache

    async def load_chain(
        self, project: str, response_id: str, *, with_tools: bool = False, share: HistoryShare | None = None
    ) -> list[Link]:
        with_body = response_id if with_tools else None
        read = partial(self._read_chain, project, response_id, int(self._now()), with_body, share=share)
        limit = FIRST_LINKS
        while True:
            chain = await read(limit, UNLIMITED if share is None else UNRESERVED_BYTES)
            if chain is None:
                return []
            if chain.walk.next_id is None or len(chain.records) < limit:
                break
            limit *= LINKS_GROWTH
        if share is not None and not all(record.is_read for record in chain.missing):
            # Requests that continue the same response wait for the first of them, and share its links.
            lock = self._chain_locks.setdefault((project, response_id), asyncio.Lock())
            async with share.hold(lock):
                chain = self._walk_chain(
                    project, response_id, chain.records, chain.revision, share, with_tools=with_tools
                )
                if not all(record.is_read for record in chain.missing):
                    await chain.reserve(share)
                    async with self._large_reads:
                        chain = await read(limit, UNLIMITED)
                        return [] if chain is None else await self._finish_chain(project, response_id, chain, share)
        if share is not None:
            await chain.reserve(share)
        return await self._finish_chain(project, response_id, chain, None)

    async def _read_chain(
        self,
        project: str,
        response_id: str,
        now: int,
        with_body: str | None,
        limit: int,
        max_bytes: int,
        *,
        share: HistoryShare | None,
    ) -> "_WalkedChain | None":
        """Read up to `limit` responses of a chain. Measure only the ones after `max_bytes`."""
        # Each statement reads the chain from its newest response, so each result is one snapshot.
        parameters = (project, response_id, now, limit, with_body, max_bytes)
        rows = await self._fetch(CHAIN, parameters)
        if not rows:
            return None
        records = {row[0]: LinkRecord(*row[:-1]) for row in rows}
        return self._walk_chain(project, response_id, records, rows[0][-1], share, with_tools=with_body is not None)

    def _walk_chain(
        self,
        project: str,
        response_id: str,
        records: dict[str, LinkRecord],
        revision: int,
        share: HistoryShare | None,
        *,
        with_tools: bool,
    ) -> "_WalkedChain":
        cache = self._chain_cache
        before = cache.bytes_found

        def find_link(link_id: str) -> Link | None:
            link = None if share is None else share.find_link((project, link_id, revision))
            return link or cache.find(project, link_id, revision)

        walk = walk_chain(response_id, records.get, find_link=find_link)
        missing = [records[link_id] for link_id, link in walk.links.items() if link is None]
        if cache.bytes_found - before + (0 if share is None else share.shared_size) > LARGE_BYTES:
            mark_large()
        return _WalkedChain(walk, records, missing, revision, cache.bytes_found - before, with_tools)

    async def _finish_chain(
        self,
        project: str,
        response_id: str,
        chain: "_WalkedChain",
        share: HistoryShare | None,
    ) -> list[Link]:
        """Decode the records of a chain and return all links. With a `share`, large links are shared."""
        records = chain.missing
        decoded, memory = await run_sized(measure_records(records), _unpack_measured, records)
        for record in records:
            link, size = decoded[record.id], memory[record.id]
            self._chain_cache.add(project, link, chain.revision, size)
            if share is not None:
                if link.final and record.size > LARGE_BYTES:
                    share.add_link((project, link.id, chain.revision), link, record.size, size)
                else:
                    share.settle(record.size, size)
        links = finish_chain(chain.walk, decoded).links
        if chain.with_tools:
            newest = chain.records[response_id]
            body = newest.body
            if not newest.is_read:  # the link was in memory, but not its body
                rows = await self._fetch(LOAD_BODY, (project, response_id, int(self._now())))
                body = rows[0][0] if rows else None
            if body is not None:
                links[-1] = add_tools(links[-1], body)
        return links


def _unpack_measured(records: Sequence[LinkRecord]) -> tuple[dict[str, Link], dict[str, int]]:
    """Return the links of the records, and their memory, by id."""
    links = unpack_links(records)
    return links, {link_id: measure_link(link) for link_id, link in links.items()}
