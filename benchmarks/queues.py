"""Queues of background responses beside each other, each in a process of its own: what a response costs."""

import asyncio
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.client import BadAnswer
from benchmarks.drivers.desk import WORDS
from benchmarks.driving import Driver, drive

# How many responses a round has, by how many of them there are at once.
RESPONSES = {1: 32, 32: 128}
# Long enough for whatever happens once a second.
IDLE_SECONDS = 2.0


class Contestant(NamedTuple):
    """A queue: its driver, and whether responses can be asked for later. If not, there is nothing to look at."""

    name: str
    driver: str
    whole: bool = True


OURS = Contestant("antiphon", "lease_queue")
PEERS = (
    Contestant("dbos alone", "dbos_alone", whole=False),
    Contestant("dbos", "dbos_two_files"),
    Contestant("dbos, one file", "dbos_one_file"),
)
OURS_IMPORTS = "from antiphon.engine.engine import Engine; from antiphon.store.sqlite.store import SqliteStore"
PEER_IMPORTS = "import dbos"


class Round(NamedTuple):
    """Milliseconds of CPU for a response, those from accepting it to its last event, and responses a second."""

    cpu: float
    p50: float
    rate: float


class Found(NamedTuple):
    """Rounds by how many there were at once, and the milliseconds of CPU that a second without work took, each by the
    name of the queue too. All lists are equally long, and their n-th entries are neighbours.
    """

    rounds: dict[tuple[int, str], list[Round]]
    idle: dict[str, list[float]]


async def measure(contestants: Sequence[tuple[Contestant, Path]], folder: Path, *, rounds: int, scale: float) -> Found:
    """Each contestant comes with the interpreter that has it."""
    found = Found(defaultdict(list), defaultdict(list))
    async with contextlib.AsyncExitStack() as stack:
        drivers: list[Driver] = []
        for each, python in contestants:
            place = folder / f"queue-{each.driver}"
            place.mkdir()
            arguments = [str(place), "a", "says", "15"]
            drivers.append(await stack.enter_async_context(drive(each.name, python, each.driver, arguments, folder)))
        for number in range(rounds + 1):  # the first one warms up
            for at_once, count in RESPONSES.items():
                for driver in drivers:
                    played = await play(driver, max(at_once, round(count * scale)), at_once)
                    if number:
                        found.rounds[at_once, driver.name].append(played)
        for _ in range(rounds):
            used = await asyncio.gather(*(driver.ask("idle", IDLE_SECONDS) for driver in drivers))
            for driver, cpu in zip(drivers, used, strict=True):
                found.idle[driver.name].append(cpu / IDLE_SECONDS * 1e3)
    return found


async def play(driver: Driver, count: int, at_once: int) -> Round:
    cpu, clock, took, texts = await driver.ask("answer", count, at_once)
    expected = "".join(["a", *WORDS])
    if not texts or set(texts) != {expected}:
        raise BadAnswer(f"{driver.name}: {texts[:1]} is not {expected!r}")
    return Round(cpu / len(texts) * 1e3, statistics.median(took) * 1e3, len(texts) / clock)
