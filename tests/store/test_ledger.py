"""The ledgers: what was appended is there, once, in order, whatever becomes of who wrote it."""

import asyncio
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.errors import ConfigError, Unavailable
from antiphon.ledger import EntryTaken, Ledger, RunSummary
from antiphon.store.ledger import MemoryLedger, SqliteLedger
from antiphon.store.location import locate_store

CHILD = Path(__file__).parent / "ledger_child.py"
PATIENCE = 30


class Clock:
    time = 1_700_000_000.5

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Ledger]:
    ledger: Ledger = (
        MemoryLedger(now=clock) if request.param == "memory" else SqliteLedger(tmp_path / "l.db", now=clock)
    )
    yield ledger
    await ledger.close()


async def test_entries_are_read_in_order_whatever_order_they_were_written_in(ledger: Ledger) -> None:
    for number in (1, 0, 10, 9):
        await ledger.append("run_1", number, b"entry %d" % number)
    await ledger.append("run_2", 0, b"\x00\xff")
    assert list(await ledger.read("run_1")) == [b"entry 0", b"entry 1", b"entry 9", b"entry 10"]
    assert list(await ledger.read("run_2")) == [b"\x00\xff"]


async def test_a_run_that_nobody_wrote_has_no_entries(ledger: Ledger) -> None:
    assert list(await ledger.read("run_1")) == []
    assert list(await ledger.runs()) == []


async def test_a_number_is_taken_once_and_who_comes_late_changes_nothing(ledger: Ledger, clock: Clock) -> None:
    await ledger.append("run_1", 0, b"first", status="running", title="a task")
    clock.time += 100
    with pytest.raises(EntryTaken, match="run_1"):
        await ledger.append("run_1", 0, b"second", status="final", title="another")
    assert list(await ledger.read("run_1")) == [b"first"]
    assert list(await ledger.runs()) == [
        RunSummary(run_id="run_1", created_at=1_700_000_000, updated_at=1_700_000_000, status="running", title="a task")
    ]


async def test_runs_are_listed_with_what_the_last_entry_that_named_it_said(ledger: Ledger, clock: Clock) -> None:
    await ledger.append("run_1", 0, b"", status="running", title="one")
    await ledger.append("run_2", 0, b"")
    clock.time += 5
    await ledger.append("run_1", 1, b"", status="final")
    await ledger.append("run_1", 2, b"")
    first = RunSummary(run_id="run_1", created_at=1_700_000_000, updated_at=1_700_000_005, status="final", title="one")
    second = RunSummary(run_id="run_2", created_at=1_700_000_000, updated_at=1_700_000_000, status="", title="")
    assert list(await ledger.runs()) == [second, first]
    assert list(await ledger.runs(limit=1)) == [second]


async def test_of_many_at_once_one_takes_the_number(ledger: Ledger) -> None:
    writers = (ledger.append("run_1", 0, b"%d" % number) for number in range(20))
    outcomes = await asyncio.gather(*writers, return_exceptions=True)
    assert sorted(str(type(outcome).__name__) for outcome in outcomes) == ["EntryTaken"] * 19 + ["NoneType"]
    assert list(await ledger.read("run_1")) == [b"%d" % outcomes.index(None)]


async def test_being_cancelled_never_leaves_it_open_whether_an_entry_is_there(ledger: Ledger) -> None:
    """A run that is cancelled writes down that it was, under the next number."""
    heard: list[str] = []

    async def write() -> None:
        number = 0
        try:
            while True:
                await ledger.append("run_1", number, b"entry")
                number += 1
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            await ledger.append("run_1", number, b"cancelled")
            heard.append("cancelled")
            raise

    for _ in range(20):
        writing = asyncio.create_task(write())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        entries = list(await ledger.read("run_1"))
        assert entries.index(b"cancelled") == len(entries) - 1
        ledger = type(ledger)() if isinstance(ledger, MemoryLedger) else await _renew(ledger)
    assert heard == ["cancelled"] * 20


async def _renew(ledger: Ledger) -> Ledger:
    assert isinstance(ledger, SqliteLedger)
    await ledger.close()
    path = ledger._path
    path.unlink()
    return SqliteLedger(path)


async def test_a_timeout_that_meets_an_append_is_a_timeout(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = SqliteLedger(path)
    await ledger.append("run_1", 0, b"first")
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        asyncio.get_running_loop().call_later(0.1, other.execute, "ROLLBACK")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ledger.append("run_1", 1, b"second")
                await asyncio.sleep(PATIENCE)
    other.close()
    assert list(await ledger.read("run_1")) == [b"first", b"second"]
    await ledger.close()


def test_one_ledger_serves_several_event_loops(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.db")
    for number in range(3):
        asyncio.run(ledger.append("run_1", number, b"%d" % number))
    assert asyncio.run(ledger.read("run_1")) == [b"0", b"1", b"2"]
    asyncio.run(ledger.close())


async def test_a_file_outlives_its_ledger(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "deep" / "down" / "ledger.db"
    first = SqliteLedger(str(path), now=clock)
    await first.append("run_1", 0, b"entry", status="running", title="a task")
    await first.close()
    await first.close()
    with pytest.raises(Unavailable):
        await first.read("run_1")
    second = SqliteLedger(path)
    assert (list(await second.read("run_1")), (await second.runs())[0].title) == ([b"entry"], "a task")
    await second.close()


async def test_the_file_is_private_and_synced(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "ledger.db"
    ledger = SqliteLedger(path)
    await ledger.append("run_1", 0, b"entry")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path.parent, *path.parent.iterdir())}
    assert modes == {"runs": 0o700, "ledger.db": 0o600, "ledger.db-wal": 0o600, "ledger.db-shm": 0o600}
    assert ledger._connection is not None
    settings = [ledger._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert settings == ["wal", 2]
    await ledger.close()


async def test_a_file_that_cannot_be_a_ledger_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, by any means" * 100)
    with pytest.raises(ConfigError, match=r"The ledger .*text cannot be opened: file is not a database"):
        await SqliteLedger(tmp_path / "text").read("run_1")
    store = locate_store(f"sqlite:///{tmp_path}/store.db")
    await store.open()
    await store.close()
    with pytest.raises(ConfigError, match="schema version"):
        await SqliteLedger(tmp_path / "store.db").read("run_1")


def start(program: str, path: Path, argument: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), program, str(path), argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_of_two_processes_exactly_one_takes_each_number(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    racers = {name: start("race", path, name) for name in ("one", "two")}
    for racer in racers.values():
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers.values():
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    taken: dict[int, str] = {}
    for name, racer in racers.items():
        said, failures = racer.communicate(timeout=PATIENCE)
        assert (racer.returncode, failures) == (0, "")
        numbers = [int(line) for line in said.split()]
        assert not taken.keys() & set(numbers)
        taken |= dict.fromkeys(numbers, name)
    ledger = SqliteLedger(path)
    assert [entry.decode() for entry in await ledger.read("run")] == [taken[number] for number in range(50)]
    await ledger.close()


@pytest.mark.parametrize("said_before", [1, 7, 40])
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, said_before: int) -> None:
    path = tmp_path / "ledger.db"
    child = start("append_for_ever", path, "run_1")
    assert child.stdout is not None
    for number in range(said_before):
        assert child.stdout.readline() == f"{number}\n"
    child.kill()
    # Not communicate(), which would miss what is read ahead already.
    acknowledged = said_before + child.stdout.read().count("\n")
    child.communicate(timeout=PATIENCE)
    ledger = SqliteLedger(path)
    entries = await ledger.read("run_1")
    assert list(entries) == [b"entry %d" % number for number in range(len(entries))]
    # The one in flight may be there or not, and the list of runs agrees with the entries either way.
    assert len(entries) - acknowledged in (0, 1)
    assert [run.title for run in await ledger.runs()] == [f"at {len(entries) - 1}"]
    await ledger.append("run_1", len(entries), b"taken over")
    await ledger.close()
