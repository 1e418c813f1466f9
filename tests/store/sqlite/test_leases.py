"""Which processes that share a database are alive."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.leases import LiveProcesses
from antiphon.store.sqlite.store import SqliteStore

CHILD = Path(__file__).with_name("child.py")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db", now=lambda: 0.0)
    await store.open()
    yield store
    await store.close()


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), "claim_and_stay", str(path)], stdout=subprocess.PIPE, text=True
    )


async def test_runs_of_a_killed_process_are_free_at_once_and_those_of_a_stopped_one_are_not(
    store: SqliteStore, make_stored: Callable[..., StoredResponse]
) -> None:
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    with start(store.path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "resp_1\n"
        child.send_signal(signal.SIGSTOP)
        assert await store.claim("us", as_of=0, lease=10, limit=9) == []
        child.kill()
    (claimed,) = await store.claim("us", as_of=0, lease=10, limit=9)
    assert (claimed.response_id, claimed.attempt, claimed.interruptions) == ("resp_1", 2, 1)


def test_who_lives_who_has_left_and_who_is_unknown_is_not_dead(tmp_path: Path) -> None:
    ours, theirs = LiveProcesses(tmp_path / "owners"), LiveProcesses(tmp_path / "owners")
    ours.register("a")
    ours.register("a")
    ours.register("b")
    assert [theirs.is_dead(owner) for owner in ("a", "b", "nobody")] == [False, False, False]
    ours.unregister("b")
    ours.unregister_all()
    assert [theirs.is_dead(owner) for owner in ("a", "b")] == [False, False]
    assert list((tmp_path / "owners").iterdir()) == []


def test_a_dead_one_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "gone").touch()
    owners = LiveProcesses(tmp_path)
    assert [owners.is_dead("gone"), owners.is_dead("gone")] == [True, False]
    assert list(tmp_path.iterdir()) == []


def test_whoever_comes_in_clears_away_what_the_dead_have_left(tmp_path: Path) -> None:
    (tmp_path / "gone").touch()
    ours, theirs = LiveProcesses(tmp_path), LiveProcesses(tmp_path)
    ours.register("a")
    theirs.register("b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_where_no_file_can_be_made_nobody_is_known_to_be_dead(tmp_path: Path) -> None:
    (tmp_path / "owners").touch()
    owners = LiveProcesses(tmp_path / "owners")
    owners.register("a")
    assert not owners.is_dead("a")
    owners.unregister("a")
