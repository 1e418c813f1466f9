"""The cost of a background response, with and without shared limits, each in a process of its own."""

import asyncio
import contextlib
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.client import InvalidAnswer
from benchmarks.driver_process import DriverProcess, start_driver
from benchmarks.drivers.desk import WORDS

# How many responses a round has, by how many of them there are at once.
RESPONSES = {1: 32, 32: 128}
# Seconds between the last response and the measurement of an idle process.
PAUSES = {"none since a moment": 0.0, "none for long": 12.0}
# Long enough for whatever happens once a second.
IDLE_SECONDS = 2.0


class Implementation(NamedTuple):
    """A queue: its driver, and what it imports."""

    name: str
    driver: str
    imports: str


_ENGINE = "from antiphon.engine.engine import Engine; from antiphon.store.sqlite.store import SqliteStore"
IMPLEMENTATIONS = (
    Implementation("store", "lease_queue", _ENGINE),
    Implementation("limited", "limited_queue", _ENGINE),
)


class Round(NamedTuple):
    """Milliseconds of CPU for a response, those from accepting it to its last event, and responses a second."""

    cpu: float
    p50: float
    rate: float


class Found(NamedTuple):
    """Rounds by how many there were at once, and the milliseconds of CPU that a second without work took, by how long
    ago the last was; each by the name of the queue too. Lists of a kind are equally long, and their n-th entries are
    neighbours.
    """

    rounds: dict[tuple[int, str], list[Round]]
    idle: dict[tuple[str, str], list[float]]


async def measure(folder: Path, *, rounds: int, scale: float) -> Found:
    found = Found(defaultdict(list), defaultdict(list))
    async with contextlib.AsyncExitStack() as stack:
        drivers: list[DriverProcess] = []
        for each in IMPLEMENTATIONS:
            place = folder / f"queue-{each.driver}"
            place.mkdir()
            arguments = [str(place), "a", "says", "15"]
            drivers.append(
                await stack.enter_async_context(
                    start_driver(each.name, Path(sys.executable), each.driver, arguments, folder)
                )
            )
        for number in range(rounds + 1):  # the first one warms up
            for at_once, count in RESPONSES.items():
                for driver in drivers:
                    played = await play(driver, max(at_once, round(count * scale)), at_once)
                    if number:
                        found.rounds[at_once, driver.name].append(played)
        for pause, settling in PAUSES.items():
            await asyncio.sleep(settling)
            used = await asyncio.gather(*(driver.send("idle", IDLE_SECONDS) for driver in drivers))
            for driver, cpu in zip(drivers, used, strict=True):
                found.idle[pause, driver.name].append(cpu / IDLE_SECONDS * 1e3)
    return found


async def play(driver: DriverProcess, count: int, at_once: int) -> Round:
    cpu, clock, took, texts = await driver.send("answer", count, at_once)
    expected = "".join(["a", *WORDS])
    if not texts or set(texts) != {expected}:
        raise InvalidAnswer(f"{driver.name}: {texts[:1]} is not {expected!r}")
    return Round(cpu / len(texts) * 1e3, statistics.median(took) * 1e3, len(texts) / clock)
