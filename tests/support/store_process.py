"""Programs that use a store in a process of their own, so that tests can kill them or run two on one file."""

import asyncio
import itertools
import resource
import subprocess
import sys
import time
from pathlib import Path

from antiphon.errors import ServerError
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import StoredResponse
from antiphon.store.limits import RunLimits
from antiphon.store.sqlite import space
from antiphon.store.sqlite.store import SqliteStore

FILLER = Unknown(b'{"type":"filler","text":"%b"}' % (b"x" * 8000))


def start_store_process(program: str, path: Path, *arguments: object) -> "subprocess.Popen[str]":
    """Start one of the programs below on the store at `path`."""
    return subprocess.Popen(
        [sys.executable, __file__, program, str(path), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def make(response_id: str, *, status: str = "completed") -> StoredResponse:
    response = Response(id=response_id, created_at=1, status=status, model="m", output=[FILLER])
    return StoredResponse(response=response, input=[])


def make_block(name: str) -> list[Unknown]:
    return [Unknown(b'{"type":"hologram_call","id":"%b_%d"}' % (name.encode(), number)) for number in range(3)]


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def save_for_ever(store: SqliteStore, _: list[str]) -> None:
    numbers = itertools.count()

    async def save_in_turn() -> None:
        for number in numbers:
            await store.save("p", make(f"resp_{number}"))
            report(f"resp_{number}")

    await asyncio.gather(*(save_in_turn() for _ in range(8)))


async def change_for_ever(store: SqliteStore, _: list[str]) -> None:
    """Append items and events and enqueue runs. In every second turn, claim, watch and cancel them."""
    for turn in itertools.count():
        await asyncio.gather(
            store.append_items("p", "conv_1", make_block(f"holo_{turn}")),
            store.append_events("p", "resp_log", 2 * turn, [b'"%d"' % number for number in (2 * turn, 2 * turn + 1)]),
            store.enqueue("p", make(f"resp_{turn}", status="queued"), b"%d" % turn),
        )
        if turn % 2:
            await store.claim("child", as_of=0, lease=10, limit=2)
            await asyncio.gather(store.mark_watched("p", f"resp_{turn}"), store.request_cancel("p", f"resp_{turn}"))
            report(str(turn))


async def save_many(store: SqliteStore, arguments: list[str]) -> None:
    name, rounds, width = arguments[0], int(arguments[1]), int(arguments[2])
    for turn in range(rounds):
        await asyncio.gather(*(store.save("p", make(f"resp_{name}_{turn}_{number}")) for number in range(width)))


async def append_many(store: SqliteStore, arguments: list[str]) -> None:
    name, rounds = arguments[0], int(arguments[1])
    for turn in range(rounds):
        await asyncio.gather(
            store.append_items("p", "conv_1", make_block(f"{name}_{turn}_a")),
            store.append_items("p", "conv_1", make_block(f"{name}_{turn}_b")),
        )


async def claim_all(store: SqliteStore, arguments: list[str]) -> None:
    while claimed := await store.claim(arguments[0], as_of=0, lease=10, limit=3):
        for run in claimed:
            report(f"{run.response_id} {run.attempt}")


async def claim_starts(store: SqliteStore, arguments: list[str]) -> None:
    """Claim runs, report them and then "done". End with stdin: others may take over the runs of a process that ends."""
    limits = RunLimits(starts_per_minute=int(arguments[1]))
    for _ in range(20):
        for run in await store.claim(arguments[0], as_of=time.time(), lease=60, limit=1, limits=limits):
            report(run.response_id)
    report("done")
    await asyncio.to_thread(sys.stdin.read)


async def claim_and_stay(store: SqliteStore, _: list[str]) -> None:
    for run in await store.claim("child", as_of=0, lease=3600, limit=9):
        report(run.response_id)
    await asyncio.Event().wait()


async def fill_the_disk(store: SqliteStore, _: list[str]) -> None:
    """Save under a limit on the file size, which gives SQLite the same error as a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    saves = (store.save("p", make(f"resp_{n}")) for n in range(0, 100, 2))
    queued = (store.enqueue("p", make(f"resp_{n}", status="queued"), b"{}") for n in range(1, 100, 2))
    outcomes = await asyncio.gather(*itertools.chain(*zip(saves, queued, strict=True)), return_exceptions=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await store.save("p", make("resp_after"))
    for number, outcome in enumerate(outcomes):
        report(f"resp_{number} {'failed' if isinstance(outcome, ServerError) else outcome}")


async def shrink_for_ever(store: SqliteStore, _: list[str]) -> None:
    """Save responses, delete most of them and shrink the file in small steps, again and again. Report the rest."""
    space.SPARE_PAGES, space.SLICE_PAGES = 8, 4
    for turn in itertools.count():
        ids = [f"resp_{turn}_{number}" for number in range(60)]
        await asyncio.gather(*(store.save("p", make(each)) for each in ids))
        await asyncio.gather(*(store.delete("p", each) for each in ids[5:]))
        for each in ids[:5]:
            report(each)
        report(f"shrinking {turn}")
        assert await store.shrink() > 0


PROGRAMS = {
    program.__name__: program
    for program in (
        save_for_ever,
        change_for_ever,
        save_many,
        append_many,
        claim_all,
        claim_starts,
        claim_and_stay,
        fill_the_disk,
        shrink_for_ever,
    )
}


async def main(program: str, path: str, *arguments: str) -> None:
    store = SqliteStore(Path(path))
    await store.open()
    await PROGRAMS[program](store, list(arguments))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
