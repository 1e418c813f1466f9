"""Processes that die or stand still in the midst of their background responses, and what becomes of those."""

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
# A process that was stopped has written what it would after this time.
_LATE_SECONDS = 1.0


class Takeover(NamedTuple):
    """Seconds from the kill to the last end, by a restart and by a process that was alive."""

    restart: float
    alive: float


class Fate(NamedTuple):
    """Of so many runs: how many nobody ever ran because their process was killed after the first commit of accepting.

    Of runs that another process took over and ended while theirs stood still: how many that one went on with when it
    woke up, and how many of them it changed.
    """

    lost: int
    resumed: int
    changed: int


class Stage(NamedTuple):
    """Where a implementation plays: every scene in a new folder."""

    implementation: Implementation
    folder: Path
    lease: float

    @property
    def patience(self) -> float:
        """After this time, the lease of a dead process has run out and everyone has looked at the queue again."""
        return self.lease * 4 / 3 + 2

    def scene(self, name: str) -> "Scene":
        folder = self.folder / f"{self.implementation.driver}-{name}"
        folder.mkdir()
        return Scene(self, folder)


class Scene(NamedTuple):
    stage: Stage
    folder: Path

    def start(self, process: str, *, holds: bool = False) -> contextlib.AbstractAsyncContextManager[DriverProcess]:
        stage = self.stage
        arguments = [str(self.folder), process, "holds" if holds else "says", str(stage.lease)]
        return start_driver(
            stage.implementation.name, Path(sys.executable), stage.implementation.driver, arguments, self.folder
        )


async def measure_takeovers(folder: Path, *, rounds: int, lease: float) -> dict[str, list[Takeover]]:
    found: dict[str, list[Takeover]] = {each.name: [] for each in IMPLEMENTATIONS}
    for number in range(rounds):
        for each in IMPLEMENTATIONS:
            stage = Stage(each, folder, lease)
            # Both wait most of the time.
            restart, alive = await asyncio.gather(
                _restart(stage.scene(f"restart-{number}")), _take_over(stage.scene(f"alive-{number}"))
            )
            found[each.name].append(Takeover(restart, alive))
    return found


async def measure_fates(folder: Path, *, lease: float) -> Mapping[str, Fate]:
    found: dict[str, Fate] = {}
    for each in IMPLEMENTATIONS:
        stage = Stage(each, folder, lease)
        lost, late = await asyncio.gather(_lose(stage.scene("between")), _write_late(stage.scene("stopped")))
        found[each.name] = Fate(lost, *late)
    return found


async def _restart(scene: Scene) -> float:
    async with scene.start("a", holds=True) as first:
        ids = await first.send("begin", RUNS)
        await first.kill()
    began = time.monotonic()
    async with scene.start("a") as second:
        await _wait_for_ends(second, ids, scene.stage.patience + 30)
        return time.monotonic() - began


async def _take_over(scene: Scene) -> float:
    async with scene.start("a", holds=True) as first:
        ids = await first.send("begin", RUNS)
        async with scene.start("b") as second:
            await first.kill()
            began = time.monotonic()
            await _wait_for_ends(second, ids, scene.stage.patience + 30)
            return time.monotonic() - began


async def _lose(scene: Scene) -> int:
    async with scene.start("a", holds=True) as first:
        ids = await first.send("stop_short", RUNS)
        await first.kill()
    async with scene.start("a") as second:
        return RUNS - await _wait_for_ends(second, ids, scene.stage.patience)


async def _write_late(scene: Scene) -> tuple[int, int]:
    """A process is stopped, another one takes over and ends everything; then the first one goes on."""
    async with scene.start("a", holds=True) as first:
        ids = await first.send("begin", RUNS)
        async with scene.start("b") as second:
            first.suspend()
            await _wait_for_ends(second, ids, scene.stage.patience + 30)
            before = await second.send("look", ids)
            (scene.folder / "go").touch()
            first.resume()
            await asyncio.sleep(_LATE_SECONDS)
            after = await second.send("look", ids)
            resumed = await first.send("count_resumed")
    return resumed, sum(one != other for one, other in zip(before, after, strict=True))


async def _wait_for_ends(driver: DriverProcess, ids: Sequence[str], seconds: float) -> int:
    """How many have ended when all have, or when so much time has gone by."""
    deadline = time.monotonic() + seconds
    while True:
        ended = sum(text is not None for text, _ in await driver.send("look", ids))
        if ended == len(ids) or time.monotonic() > deadline:
            return ended
        await asyncio.sleep(_PAUSE)
