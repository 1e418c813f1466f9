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
from benchmarks.drivers.queue_driver import WORDS

# Responses per round, by concurrency.
RESPONSES = {1: 32, 32: 128}
# Seconds between the last response and the measurement of an idle process.
PAUSES = {"idle, just after a response": 0.0, "idle, 12 s after a response": 12.0}
# Long enough to include tasks that run once a second.
IDLE_SECONDS = 2.0


class Implementation(NamedTuple):
    """A queue implementation: its driver, and its import statement."""

    name: str
    driver: str
    imports: str


_ENGINE = "from antiphon.engine.engine import Engine; from antiphon.store.sqlite.store import SqliteStore"
IMPLEMENTATIONS = (
    Implementation("store", "lease_queue", _ENGINE),
    Implementation("limited", "limited_queue", _ENGINE),
)


class Round(NamedTuple):
    """CPU milliseconds per response, median milliseconds from acceptance to last event, responses per second."""

    cpu: float
    p50: float
    rate: float


class Measurements(NamedTuple):
    """The measurements of all queues.

    `rounds` is keyed by concurrency and queue name. `idle` has the CPU milliseconds per idle second, by pause and queue
    name. Lists of a kind have the same length; equal indexes are from the same time.
    """

    rounds: dict[tuple[int, str], list[Round]]
    idle: dict[tuple[str, str], list[float]]


async def measure(folder: Path, *, rounds: int, scale: float) -> Measurements:
    found = Measurements(defaultdict(list), defaultdict(list))
    async with contextlib.AsyncExitStack() as stack:
        drivers: list[DriverProcess] = []
        for each in IMPLEMENTATIONS:
            database_folder = folder / f"queue-{each.driver}"
            database_folder.mkdir()
            arguments = [str(database_folder), "a", "answers", "15"]
            drivers.append(
                await stack.enter_async_context(
                    start_driver(each.name, Path(sys.executable), each.driver, arguments, folder)
                )
            )
        for number in range(rounds + 1):  # the first round is a warm-up
            for at_once, count in RESPONSES.items():
                for driver in drivers:
                    measured = await run_round(driver, max(at_once, round(count * scale)), at_once)
                    if number:
                        found.rounds[at_once, driver.name].append(measured)
        for pause, settling in PAUSES.items():
            await asyncio.sleep(settling)
            used = await asyncio.gather(*(driver.send("idle", IDLE_SECONDS) for driver in drivers))
            for driver, cpu in zip(drivers, used, strict=True):
                found.idle[pause, driver.name].append(cpu / IDLE_SECONDS * 1e3)
    return found


async def run_round(driver: DriverProcess, count: int, at_once: int) -> Round:
    cpu, clock, took, texts = await driver.send("answer", count, at_once)
    expected = "".join(["a", *WORDS])
    if not texts or set(texts) != {expected}:
        raise InvalidAnswer(f"{driver.name}: {texts[:1]} is not {expected!r}")
    return Round(cpu / len(texts) * 1e3, statistics.median(took) * 1e3, len(texts) / clock)
