"""Retention: what has expired is deleted at the start and every hour, and a broken store does not end that."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine import retention
from antiphon.engine.keeping import expiry
from antiphon.engine.policy import Policy
from antiphon.engine.retention import Retention
from antiphon.errors import ServerError
from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.store import SqliteStore


class SweptStore(SqliteStore):
    """Tells of each sweep; the first may fail."""

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


def respond(name: str, expires_at: int | None) -> StoredResponse:
    response = Response(id=name, created_at=0, model="scripted", status="completed")
    return StoredResponse(response=response, input=[], expires_at=expires_at)


async def test_an_engine_deletes_what_has_expired_when_it_starts(make_bench: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "antiphon.db")
    await store.open()
    now = int(time.time())
    for name, expires_at in (("resp_old", now - 1), ("resp_young", now + 1000), ("resp_kept", None)):
        await store.save("default", respond(name, expires_at))
    await store.close()
    swept = SweptStore(tmp_path / "antiphon.db")
    await make_bench(store=swept)
    assert await swept.sweeps.get() == 1
    assert await swept.load("default", "resp_young") is not None
    assert await swept.load("default", "resp_kept") is not None


async def test_it_is_done_again_and_again_even_if_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "SWEEP_SECONDS", 0)
    store = SweptStore(tmp_path / "antiphon.db", broken=True)
    await store.open()
    sweeper = Retention(store)
    sweeper.start()
    assert [await store.sweeps.get() for _ in range(3)] == [-1, 0, 0]
    await sweeper.close()
    await store.close()


async def test_closing_what_never_started_is_nothing(tmp_path: Path) -> None:
    await Retention(SqliteStore(tmp_path / "antiphon.db")).close()


def test_what_is_kept_expires_when_the_policy_says() -> None:
    assert expiry(Policy(retention_seconds=None)) is None
    before = int(time.time())
    at = expiry(Policy(retention_seconds=60))
    assert at is not None
    assert 60 <= at - before <= 62
