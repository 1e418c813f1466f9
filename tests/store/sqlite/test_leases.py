"""Detection of dead processes that share a database."""

import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.leases import LiveProcesses
from antiphon.store.sqlite.store import SqliteStore
from support.store_process import start_store_process


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db", now=lambda: 0.0)
    await store.open()
    yield store
    await store.close()


async def test_runs_of_a_killed_process_are_claimed_before_the_lease_expires(
    store: SqliteStore, make_stored: Callable[..., StoredResponse]
) -> None:
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    with start_store_process("claim_and_stay", store.path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "resp_1\n"
        child.send_signal(signal.SIGSTOP)
        assert await store.claim("us", as_of=0, lease=10, limit=9) == []
        child.kill()
    (claimed,) = await store.claim("us", as_of=0, lease=10, limit=9)
    assert (claimed.response_id, claimed.attempt, claimed.interruptions) == ("resp_1", 2, 1)


def test_live_unregistered_and_unknown_owners_are_not_dead(tmp_path: Path) -> None:
    ours, theirs = LiveProcesses(tmp_path / "owners"), LiveProcesses(tmp_path / "owners")
    ours.register("a")
    ours.register("a")
    ours.register("b")
    assert [theirs.is_dead(owner) for owner in ("a", "b", "unknown")] == [False, False, False]
    ours.unregister("b")
    ours.unregister_all()
    assert [theirs.is_dead(owner) for owner in ("a", "b")] == [False, False]
    assert list((tmp_path / "owners").iterdir()) == []


def test_lock_file_of_a_dead_owner_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "gone").touch()
    owners = LiveProcesses(tmp_path)
    assert [owners.is_dead("gone"), owners.is_dead("gone")] == [True, False]
    assert list(tmp_path.iterdir()) == []


def test_register_deletes_the_lock_files_of_dead_owners(tmp_path: Path) -> None:
    (tmp_path / "gone").touch()
    ours, theirs = LiveProcesses(tmp_path), LiveProcesses(tmp_path)
    ours.register("a")
    theirs.register("b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_owner_without_a_lock_file_is_not_dead(tmp_path: Path) -> None:
    (tmp_path / "owners").touch()
    owners = LiveProcesses(tmp_path / "owners")
    owners.register("a")
    assert not owners.is_dead("a")
    owners.unregister("a")
