"""Expiry: rows are deleted at the start and every hour, also after a failure of the store."""

import asyncio
import sqlite3
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine import expiry
from antiphon.engine.expiry import ExpirySweeper, claim_effect, compute_expiry
from antiphon.engine.policy import Policy
from antiphon.errors import NotFound, PreviousResponseNotFound, ServerError
from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.store import SqliteStore


class SweptStore(SqliteStore):
    """A store that reports each sweep. The first may fail."""

    def __init__(self, path: Path, *, broken: bool = False) -> None:
        super().__init__(path)
        self.sweeps: asyncio.Queue[int] = asyncio.Queue()
        self._broken = broken

    async def expire(self, now: int) -> int:
        if self._broken:
            self._broken = False
            await self.sweeps.put(-1)
            raise ServerError("The store failed: disk is full")
        gone = await super().expire(now)
        await self.sweeps.put(gone)
        return gone


class Clock:
    """A clock that moves only when a test sets it."""

    time = 1_700_000_000

    def __call__(self) -> float:
        return self.time


def respond(name: str, expires_at: int | None) -> StoredResponse:
    response = Response(id=name, created_at=0, model="scripted", status="completed")
    return StoredResponse(response=response, input=[], expires_at=expires_at)


async def test_engine_start_deletes_rows_expired_an_hour_ago(make_harness: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "antiphon.db")
    await store.open()
    now = int(time.time())
    for name, expires_at in (("resp_old", now - 3700), ("resp_new", now - 1), ("resp_kept", None)):
        await store.save("default", respond(name, expires_at))
    await store.close()
    swept = SweptStore(tmp_path / "antiphon.db")
    await make_harness(store=swept)
    assert await swept.sweeps.get() == 1
    with closing(sqlite3.connect(swept.path)) as connection:
        assert connection.execute("SELECT id FROM responses ORDER BY id").fetchall() == [("resp_kept",), ("resp_new",)]


async def test_chain_in_use_outlives_expiry_of_first_responses(
    make_harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    store = SqliteStore(tmp_path / "antiphon.db", now=clock)
    harness = await make_harness({"default": "{history} items"}, store=store, retention_seconds=30)
    turns = [await harness.answer("turn 0")]
    for turn in range(1, 5):
        clock.time += 20
        assert await store.expire(clock.time) == 0
        turns.append(await harness.answer(f"turn {turn}", previous_response_id=turns[-1].id))
    assert [turn.output_text for turn in turns] == [f"{number} items" for number in (1, 3, 5, 7, 9)]

    first = turns[0].id
    with pytest.raises(NotFound):
        await harness.engine.retrieve("default", first)
    with pytest.raises(NotFound):
        await harness.engine.input_items("default", first, after=None, limit=20, order="asc")
    with pytest.raises(NotFound):
        await harness.engine.delete("default", first)
    with pytest.raises(NotFound):
        await harness.ask([{"type": "item_reference", "id": turns[0].output[0].id}])
    with pytest.raises(PreviousResponseNotFound):
        await harness.ask("fork", previous_response_id=first)

    clock.time += 30
    with pytest.raises(PreviousResponseNotFound):
        await harness.ask("too late", previous_response_id=turns[-1].id)
    assert await store.expire(clock.time) == len(turns)
    with closing(sqlite3.connect(store.path)) as connection:
        assert connection.execute("SELECT count(*) FROM responses").fetchone() == (0,)


async def test_sweep_repeats_after_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "EXPIRY_INTERVAL_SECONDS", 0)
    store = SweptStore(tmp_path / "antiphon.db", broken=True)
    await store.open()
    sweeper = ExpirySweeper(store)
    sweeper.start()
    assert [await store.sweeps.get() for _ in range(3)] == [-1, 0, 0]
    await sweeper.close()
    await store.close()


async def test_close_before_start_does_nothing(tmp_path: Path) -> None:
    await ExpirySweeper(SqliteStore(tmp_path / "antiphon.db")).close()


def test_expiry_follows_policy() -> None:
    assert compute_expiry(Policy(retention_seconds=None)) is None
    before = int(time.time())
    at = compute_expiry(Policy(retention_seconds=60))
    assert at is not None
    assert before + 60 <= at <= int(time.time()) + 62


@pytest.mark.parametrize(("retention", "days"), [(7 * 86_400, 7), (None, 365)])
async def test_claim_of_an_effect_expires_with_the_responses(
    make_harness: Any, retention: int | None, days: int
) -> None:
    harness = await make_harness(retention_seconds=retention)
    claim = partial(claim_effect, harness.store, Policy(retention_seconds=retention))
    assert [await claim("p", "key"), await claim("p", "key")] == [True, False]
    await harness.store.expire(int(time.time()) + (days - 1) * 86_400)
    assert not await claim("p", "key")
    await harness.store.expire(int(time.time()) + (days + 1) * 86_400)
    assert await claim("p", "key")
