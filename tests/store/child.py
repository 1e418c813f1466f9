"""Programs that test_sqlite.py starts as processes of their own, to kill them or to run two of them on one file."""

import asyncio
import itertools
import resource
import sys
from pathlib import Path

from antiphon.errors import ServerError
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from antiphon.store.sqlite import SqliteStore

FILLER = Unknown(b'{"type":"filler","text":"%b"}' % (b"x" * 8000))


def make(response_id: str) -> StoredResponse:
    return StoredResponse(response=Response(id=response_id, created_at=1, model="m", output=[FILLER]), input=[])


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


async def save_many(store: SqliteStore, arguments: list[str]) -> None:
    name, rounds, width = arguments[0], int(arguments[1]), int(arguments[2])
    for turn in range(rounds):
        await asyncio.gather(*(store.save("p", make(f"resp_{name}_{turn}_{number}")) for number in range(width)))


async def fill_the_disk(store: SqliteStore, _: list[str]) -> None:
    """A limit on the size of files stands in for a full disk: SQLite meets the same error."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    outcomes = await asyncio.gather(*(store.save("p", make(f"resp_{n}")) for n in range(100)), return_exceptions=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await store.save("p", make("resp_after"))
    for number, outcome in enumerate(outcomes):
        report(f"resp_{number} {'failed' if isinstance(outcome, ServerError) else outcome}")


async def main(program: str, path: str, *arguments: str) -> None:
    store = SqliteStore(Path(path))
    await store.open()
    programs = {"save_for_ever": save_for_ever, "save_many": save_many, "fill_the_disk": fill_the_disk}
    await programs[program](store, list(arguments))
    await store.close()


asyncio.run(main(*sys.argv[1:]))
