"""Chains in SQLite: cached links give the same results as reading everything again."""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.protocol.items import Message
from antiphon.protocol.request import ConversationRef
from antiphon.protocol.response import Response
from antiphon.protocol.tools import FunctionTool
from antiphon.store import sql_chains
from antiphon.store.base import StoredResponse
from antiphon.store.chain_cache import ChainCache
from antiphon.store.sqlite.store import SqliteStore

MakeStored = Callable[..., StoredResponse]

IDS = [f"resp_{number}" for number in range(8)]
PROJECTS = ["p", "q"]


class Step(NamedTuple):
    """One operation of one of the writers, or with `now` a change of the clock before it."""

    writer: int
    name: str
    arguments: tuple[Any, ...]
    now: int


def make_response(number: int, previous: int | None, status: str, text: str, expires_at: int | None) -> StoredResponse:
    return StoredResponse(
        response=Response(
            id=IDS[number],
            created_at=1,
            model="m",
            status=status,
            previous_response_id=None if previous is None else IDS[previous],
            conversation=ConversationRef("conv_1") if text == "in a conversation" else None,
            output=[Message("assistant", text, f"msg_{number}")],
            tools=[FunctionTool("f")] if text == "with tools" else [],
        ),
        input=[Message("user", "Hello")],
        expires_at=expires_at,
    )


numbers = st.integers(0, len(IDS) - 1)
projects = st.sampled_from(PROJECTS)
stored_responses = st.builds(
    make_response,
    numbers,
    st.none() | numbers,
    st.sampled_from(["completed", "completed", "completed", "failed", "in_progress"]),
    st.sampled_from(["one", "two", "in a conversation", "with tools"]),
    st.none() | st.sampled_from([20, 30]),
)
operations = st.one_of(
    st.tuples(st.just("save"), st.tuples(projects, stored_responses)),
    st.tuples(st.just("save"), st.tuples(projects, stored_responses)),
    st.tuples(st.just("save"), st.tuples(projects, stored_responses)),
    st.tuples(st.just("delete"), st.tuples(projects, st.sampled_from(IDS))),
    st.tuples(st.just("expire"), st.tuples(st.sampled_from([15, 25, 35]))),
)
steps = st.builds(
    lambda writer, operation, now: Step(writer, *operation, now),
    st.integers(0, 1),
    operations,
    st.sampled_from([10, 10, 10, 25]),
)


async def compare_chains(path: Path, sequence: list[Step], cache_bytes: int) -> None:
    """Run the steps with two stores on one file. Compare their chains with those of a store without a cache."""
    time = 0

    def now() -> float:
        return time

    stores = [SqliteStore(path, now=now) for _ in range(3)]
    for store, max_bytes in zip(stores, (1_000_000, cache_bytes, 0), strict=True):
        store._chain_cache = ChainCache(max_bytes=max_bytes)
        await store.open()
    *cached, uncached = stores
    try:
        for step in sequence:
            time = step.now
            await getattr(cached[step.writer], step.name)(*step.arguments)
            for project in PROJECTS:
                for response_id in IDS:
                    expected = await uncached.load_chain(project, response_id, with_tools=True)
                    for store in cached:
                        assert await store.load_chain(project, response_id, with_tools=True) == expected
        assert uncached._chain_cache.size == 0
    finally:
        for store in stores:
            await store.close()


@given(st.lists(steps, min_size=1, max_size=25), st.sampled_from([1_500, 4_000, 100_000]))
def test_cached_chains_equal_uncached_chains(sequence: list[Step], cache_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql_chains, "FIRST_LINKS", 1)  # so that chains of eight responses are read in parts
        patch.setattr(sql_chains, "LINKS_GROWTH", 2)
        asyncio.run(compare_chains(Path(folder) / "store.db", sequence, cache_bytes))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    yield store
    await store.close()


async def save_chain(store: SqliteStore, make_stored: MakeStored, turns: int) -> None:
    ids: list[str | None] = [None, *(f"resp_{turn}" for turn in range(turns))]
    await asyncio.gather(
        *(store.save("p", make_stored(each, previous=earlier)) for earlier, each in itertools.pairwise(ids))
    )


def count_rows_read(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of rows of each read is added."""
    counts: list[int] = []
    submit = store._reader.submit

    async def submit_and_count(*arguments: Any) -> Any:
        rows = await submit(*arguments)
        counts.append(len(rows))
        return rows

    monkeypatch.setattr(store._reader, "submit", submit_and_count)
    return counts


async def test_continuation_of_a_cached_chain_reads_only_the_newest_links(
    store: SqliteStore, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_chain(store, make_stored, 100)
    assert len(await store.load_chain("p", "resp_98")) == 99
    counts = count_rows_read(store, monkeypatch)
    assert len(await store.load_chain("p", "resp_99")) == 100
    assert counts == [sql_chains.FIRST_LINKS]


async def test_branch_of_a_cached_chain_reads_only_the_newest_links(
    store: SqliteStore, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_chain(store, make_stored, 100)
    await store.load_chain("p", "resp_99")
    await store.save("p", make_stored("resp_branch", previous="resp_49"))
    counts = count_rows_read(store, monkeypatch)
    assert [link.id for link in await store.load_chain("p", "resp_branch")][-2:] == ["resp_49", "resp_branch"]
    assert counts == [sql_chains.FIRST_LINKS]


async def test_deletion_by_another_process_ends_a_cached_chain(
    store: SqliteStore, make_stored: MakeStored, tmp_path: Path
) -> None:
    await save_chain(store, make_stored, 20)
    assert len(await store.load_chain("p", "resp_19")) == 20
    other = SqliteStore(tmp_path / "store.db")
    await other.open()
    await other.delete("p", "resp_5")
    await other.close()
    chain = await store.load_chain("p", "resp_19")
    assert (chain[0].id, chain[0].previous_response_id, len(chain)) == ("resp_6", "resp_5", 14)


async def test_deletion_in_one_project_keeps_the_cached_chains_of_others(
    store: SqliteStore, make_stored: MakeStored, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_chain(store, make_stored, 20)
    await store.load_chain("p", "resp_19")
    await store.save("q", make_stored("resp_0"))
    await store.delete("q", "resp_0")
    counts = count_rows_read(store, monkeypatch)
    assert len(await store.load_chain("p", "resp_19")) == 20
    assert counts == [sql_chains.FIRST_LINKS]
