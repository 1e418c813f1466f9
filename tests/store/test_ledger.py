"""Ledgers: entries are stored once and in order, also after cancellation and crashes."""

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.errors import ConfigError, StoreLost, Unavailable
from antiphon.ledger import Holder, Ledger, RunSummary, RunTaken
from antiphon.store.ledger import MemoryLedger, SqliteLedger
from antiphon.store.location import locate_store
from support.ledger_process import start_ledger_process

TIMEOUT = 30


class Clock:
    time = 1_700_000_000.5

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Ledger]:
    ledger: Ledger = MemoryLedger(now=clock)
    if request.param == "sqlite":
        ledger = SqliteLedger(tmp_path / "l.db", now=clock)
    elif request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        from antiphon.store.postgres.ledger import PostgresLedger

        ledger = PostgresLedger(url, now=clock)
    yield ledger
    await ledger.close()


async def test_entries_are_read_in_order_of_their_numbers(ledger: Ledger) -> None:
    for number in (1, 0, 10, 9):
        await ledger.append("run_1", number, b"entry %d" % number)
    await ledger.append("run_2", 0, b"\x00\xff")
    assert list(await ledger.read("run_1")) == [b"entry 0", b"entry 1", b"entry 9", b"entry 10"]
    assert list(await ledger.read("run_2")) == [b"\x00\xff"]


async def test_unknown_run_has_no_entries(ledger: Ledger) -> None:
    assert list(await ledger.read("run_1")) == []
    assert list(await ledger.runs()) == []


async def test_second_append_of_a_number_changes_nothing(ledger: Ledger, clock: Clock) -> None:
    await ledger.append("run_1", 0, b"first", status="running", title="a task")
    clock.time += 100
    with pytest.raises(RunTaken, match="run_1"):
        await ledger.append("run_1", 0, b"second", status="final", title="another")
    assert list(await ledger.read("run_1")) == [b"first"]
    assert list(await ledger.runs()) == [
        RunSummary(run_id="run_1", created_at=1_700_000_000, updated_at=1_700_000_000, status="running", title="a task")
    ]


async def test_runs_are_listed_with_the_last_status_and_title(ledger: Ledger, clock: Clock) -> None:
    await ledger.append("run_1", 0, b"", status="running", title="one")
    await ledger.append("run_2", 0, b"")
    clock.time += 5
    await ledger.append("run_1", 1, b"", status="final")
    await ledger.append("run_1", 2, b"")
    first = RunSummary(run_id="run_1", created_at=1_700_000_000, updated_at=1_700_000_005, status="final", title="one")
    second = RunSummary(run_id="run_2", created_at=1_700_000_000, updated_at=1_700_000_000, status="", title="")
    assert list(await ledger.runs()) == [second, first]
    assert list(await ledger.runs(limit=1)) == [second]


async def test_one_of_many_concurrent_appends_succeeds(ledger: Ledger) -> None:
    writers = (ledger.append("run_1", 0, b"%d" % number) for number in range(20))
    outcomes = await asyncio.gather(*writers, return_exceptions=True)
    assert sorted(str(type(outcome).__name__) for outcome in outcomes) == ["NoneType"] + ["RunTaken"] * 19
    assert list(await ledger.read("run_1")) == [b"%d" % outcomes.index(None)]


async def test_cancelled_append_is_complete_when_the_caller_is_notified(ledger: Ledger) -> None:
    """A cancelled run appends an entry about its cancellation under the next number."""
    cancellations: list[str] = []

    async def write() -> None:
        number = 0
        try:
            while True:
                await ledger.append("run_1", number, b"entry")
                number += 1
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            await ledger.append("run_1", number, b"cancelled")
            cancellations.append("cancelled")
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
        ledger = type(ledger)() if isinstance(ledger, MemoryLedger) else await _recreate(ledger)
    assert cancellations == ["cancelled"] * 20


async def _recreate(ledger: Ledger) -> Ledger:
    if not isinstance(ledger, SqliteLedger):
        await ledger.delete("run_1")
        return ledger
    await ledger.close()
    path = ledger._path
    path.unlink()
    return SqliteLedger(path)


async def test_timeout_during_an_append_raises_timeout_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = SqliteLedger(path)
    await ledger.append("run_1", 0, b"first")
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        asyncio.get_running_loop().call_later(0.1, other.execute, "ROLLBACK")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ledger.append("run_1", 1, b"second")
                await asyncio.sleep(TIMEOUT)
    other.close()
    assert list(await ledger.read("run_1")) == [b"first", b"second"]
    await ledger.close()


def test_one_ledger_serves_several_event_loops(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.db")
    for number in range(3):
        asyncio.run(ledger.append("run_1", number, b"%d" % number))
    assert asyncio.run(ledger.read("run_1")) == [b"0", b"1", b"2"]
    asyncio.run(ledger.close())


async def test_entries_are_read_after_reopening_the_file(tmp_path: Path, clock: Clock) -> None:
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


async def test_ledger_file_is_private_and_synced(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "ledger.db"
    ledger = SqliteLedger(path)
    await ledger.append("run_1", 0, b"entry")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path.parent, *path.parent.iterdir())}
    assert modes == {"runs": 0o700, "ledger.db": 0o600, "ledger.db-wal": 0o600, "ledger.db-shm": 0o600}
    assert ledger._connection is not None
    settings = [ledger._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert settings == ["wal", 2]
    await ledger.close()


async def test_open_error_names_the_ledger_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database" * 100)
    with pytest.raises(ConfigError, match=r"The ledger .*text cannot be opened: file is not a database"):
        await SqliteLedger(tmp_path / "text").read("run_1")
    store = locate_store(f"sqlite:///{tmp_path}/store.db")
    await store.open()
    await store.close()
    with pytest.raises(ConfigError, match="schema version"):
        await SqliteLedger(tmp_path / "store.db").read("run_1")


async def test_one_of_two_processes_takes_each_number(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    racers = {name: start_ledger_process("race", path, name) for name in ("one", "two")}
    for racer in racers.values():
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers.values():
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    taken: dict[int, str] = {}
    for name, racer in racers.items():
        printed, errors = racer.communicate(timeout=TIMEOUT)
        assert (racer.returncode, errors) == (0, "")
        numbers = [int(line) for line in printed.split()]
        assert not taken.keys() & set(numbers)
        taken |= dict.fromkeys(numbers, name)
    ledger = SqliteLedger(path)
    assert [entry.decode() for entry in await ledger.read("run")] == [taken[number] for number in range(50)]
    await ledger.close()


@pytest.mark.parametrize("lines_read", [1, 7, 40])
async def test_acknowledged_entries_survive_sigkill(tmp_path: Path, lines_read: int) -> None:
    path = tmp_path / "ledger.db"
    child = start_ledger_process("append_for_ever", path, "run_1")
    assert child.stdout is not None
    for number in range(lines_read):
        assert child.stdout.readline() == f"{number}\n"
    child.kill()
    # communicate() would lose the lines that are in the buffer already.
    acknowledged = lines_read + child.stdout.read().count("\n")
    child.communicate(timeout=TIMEOUT)
    ledger = SqliteLedger(path)
    entries = await ledger.read("run_1")
    assert list(entries) == [b"entry %d" % number for number in range(len(entries))]
    # The last write may be stored or not. The list of runs agrees with the entries in both cases.
    assert len(entries) - acknowledged in (0, 1)
    assert [run.title for run in await ledger.runs()] == [f"at {len(entries) - 1}"]
    await ledger.append("run_1", len(entries), b"taken over")
    await ledger.close()


async def test_deleted_run_and_its_subagents_are_gone(ledger: Ledger) -> None:
    for run_id in ("run_1", "run_1:1:0", "run_1:1:0:2:1", "run_1:note", "run_10", "run_2"):
        await ledger.append(run_id, 0, b"entry", status="final")
    assert await ledger.delete("run_1")
    assert [run.run_id for run in await ledger.runs()] == ["run_2", "run_10", "run_1:note"]
    assert [list(await ledger.read(run_id)) for run_id in ("run_1", "run_1:1:0", "run_2")] == [[], [], [b"entry"]]
    assert not await ledger.delete("run_1")
    await ledger.append("run_1", 0, b"again")
    assert list(await ledger.read("run_1")) == [b"again"]


async def test_owned_run_is_deleted_only_with_the_name_of_its_owner(ledger: Ledger) -> None:
    await ledger.append("run_1", 0, b"entry")
    assert await ledger.hold("run_1", "owner", 30)
    assert not await ledger.delete("run_1")
    assert list(await ledger.read("run_1")) == [b"entry"]
    assert await ledger.delete("run_1", owner="owner")
    with pytest.raises(RunTaken):
        await ledger.append("run_1", 1, b"late", holder=Holder("run_1", "owner"))
    assert list(await ledger.read("run_1")) == []


def move_files(folder: Path) -> None:
    for file in list(folder.iterdir()):
        file.rename(folder / f"moved-{file.name}")


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_entry_for_a_lost_file_is_refused(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "ledger.db"
    ledger = SqliteLedger(path)
    await ledger.append("run_1", 0, b"entry")
    move_files(tmp_path)
    other = SqliteLedger(path)
    if is_replaced:
        await other.append("run_2", 0, b"entry")
    with pytest.raises(StoreLost, match=r"The ledger is lost.*ledger\.db(-shm)? was (deleted or moved|replaced)"):
        await ledger.append("run_1", 1, b"next")
    await ledger.close()
    if is_replaced:
        # The loss must not damage the ledger that is at the path now.
        await other.append("run_2", 1, b"next")
        assert list(await other.read("run_2")) == [b"entry", b"next"]
    await other.close()
