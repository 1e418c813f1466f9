"""Background responses of processes that are killed or suspended while they run."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.driver_process import DriverProcess, start_driver
from benchmarks.queues import IMPLEMENTATIONS, Implementation

RUNS = 16
_PAUSE = 0.05
# A resumed process has made its late writes after this time.
_LATE_SECONDS = 1.0


class Takeover(NamedTuple):
    """Seconds from the kill until all runs have ended: after a restart, and with another live process."""

    restart: float
    alive: float


class CrashCounts(NamedTuple):
    """Number of affected runs.

    `lost`: never ran, because the process was killed after the first commit of accepting them. `resumed`: continued by
    a suspended process after another process had taken over and ended them. `changed`: changed by that process.
    """

    lost: int
    resumed: int
    changed: int


class Scenario(NamedTuple):
    """One measurement of an implementation, in a folder of its own."""

    implementation: Implementation
    folder: Path
    lease: float

    @property
    def takeover_timeout(self) -> float:
        """Seconds until the lease of a dead process has expired and every process has checked the queue again."""
        return self.lease * 4 / 3 + 2

    def start(self, process: str, *, holds: bool = False) -> contextlib.AbstractAsyncContextManager[DriverProcess]:
        arguments = [str(self.folder), process, "holds" if holds else "answers", str(self.lease)]
        name, driver, _ = self.implementation
        return start_driver(name, Path(sys.executable), driver, arguments, self.folder)


def _make_scenario(implementation: Implementation, folder: Path, name: str, lease: float) -> Scenario:
    own = folder / f"{implementation.driver}-{name}"
    own.mkdir()
    return Scenario(implementation, own, lease)


async def measure_takeovers(folder: Path, *, rounds: int, lease: float) -> dict[str, list[Takeover]]:
    found: dict[str, list[Takeover]] = {each.name: [] for each in IMPLEMENTATIONS}
    for number in range(rounds):
        for each in IMPLEMENTATIONS:
            # Concurrently, because both wait most of the time.
            restart, alive = await asyncio.gather(
                _restart(_make_scenario(each, folder, f"restart-{number}", lease)),
                _take_over(_make_scenario(each, folder, f"alive-{number}", lease)),
            )
            found[each.name].append(Takeover(restart, alive))
    return found


async def count_lost_and_changed(folder: Path, *, lease: float) -> Mapping[str, CrashCounts]:
    found: dict[str, CrashCounts] = {}
    for each in IMPLEMENTATIONS:
        lost, late = await asyncio.gather(
            _count_lost(_make_scenario(each, folder, "killed", lease)),
            _count_late_writes(_make_scenario(each, folder, "suspended", lease)),
        )
        found[each.name] = CrashCounts(lost, *late)
    return found


async def _restart(scenario: Scenario) -> float:
    async with scenario.start("a", holds=True) as first:
        ids = await first.send("start", RUNS)
        await first.kill()
    began = time.monotonic()
    async with scenario.start("a") as second:
        await _wait_for_ends(second, ids, scenario.takeover_timeout + 30)
        return time.monotonic() - began


async def _take_over(scenario: Scenario) -> float:
    async with scenario.start("a", holds=True) as first:
        ids = await first.send("start", RUNS)
        async with scenario.start("b") as second:
            await first.kill()
            began = time.monotonic()
            await _wait_for_ends(second, ids, scenario.takeover_timeout + 30)
            return time.monotonic() - began


async def _count_lost(scenario: Scenario) -> int:
    async with scenario.start("a", holds=True) as first:
        ids = await first.send("accept_only", RUNS)
        await first.kill()
    async with scenario.start("a") as second:
        return RUNS - await _wait_for_ends(second, ids, scenario.takeover_timeout)


async def _count_late_writes(scenario: Scenario) -> tuple[int, int]:
    """Return how many runs a suspended process continues after a takeover, and how many it changes."""
    async with scenario.start("a", holds=True) as first:
        ids = await first.send("start", RUNS)
        async with scenario.start("b") as second:
            first.suspend()
            await _wait_for_ends(second, ids, scenario.takeover_timeout + 30)
            before = await second.send("read_records", ids)
            (scenario.folder / "go").touch()
            first.resume()
            await asyncio.sleep(_LATE_SECONDS)
            after = await second.send("read_records", ids)
            resumed = await first.send("count_resumed")
    return resumed, sum(one != other for one, other in zip(before, after, strict=True))


async def _wait_for_ends(driver: DriverProcess, ids: Sequence[str], seconds: float) -> int:
    """Wait until all runs have ended or the time is over. Return the number of ended runs."""
    deadline = time.monotonic() + seconds
    while True:
        ended = sum(text is not None for text, _ in await driver.send("read_records", ids))
        if ended == len(ids) or time.monotonic() > deadline:
            return ended
        await asyncio.sleep(_PAUSE)
