"""Runs whose process is killed at any step and at any moment: no call is lost, and none runs twice unnoticed."""

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.agent.resume import INTERRUPTED
from antiphon.store.ledger import SqliteLedger
from support.crashing_agent import AT_ONCE, CALLS, RUN_ID

KILLED = -9
# Two for each entry (a run of 12 calls, 3 at a time, has 31: start, 5 turns, 2 for each call, end) and two for each
# effect.
STEPS = 86
# Maximum number of steps of an attempt that is killed.
MOST_STEPS = 25


class Attempts:
    """A process that forks an attempt for each order."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "support" / "crashing_agent.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, directory: Path, **order: Any) -> bool:
        """Run an attempt. Return True if it finished, False if it was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        whole = {"policy": "retry", "kill_at": None, "kill_after": None, "verdict": None, "nested": False} | order
        self._process.stdin.write(json.dumps(whole | {"directory": str(directory)}) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        assert status in (0, KILLED)
        return status == 0

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    opened = Attempts()
    yield opened
    opened.close()


def read_effects(directory: Path) -> Counter[str]:
    path = directory / "effects"
    return Counter(path.read_text().splitlines() if path.exists() else ())


def read_outcome(directory: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((directory / "outcome").read_text())
    return outcome


async def find_in_flight(directory: Path, run_id: str = RUN_ID) -> set[str]:
    """Return the effects of calls without a result in the ledger. They may have happened or not."""
    ledger = SqliteLedger(directory / "runs.db")
    entries = [json.loads(entry) for entry in await ledger.read(run_id)]
    await ledger.close()
    turns, open_calls = 0, dict[str, str]()
    for entry in entries:
        if entry["entry"] == "Answered":
            turns += 1
            calls = [item["call_id"] for item in entry["output"] if item["type"] == "function_call"]
        elif entry["entry"] == "Intended":
            call_id = entry["call_id"]
            open_calls[call_id] = f"{call_id.removeprefix('call_')} {run_id}:{turns}:{calls.index(call_id)}"
        elif entry["entry"] == "Resulted":
            open_calls.pop(entry["call_id"], None)
    return set(open_calls.values())


def expect_effects(run_id: str = RUN_ID, count: int = CALLS) -> set[str]:
    """Return all effects, each with its key."""
    return {f"{number} {run_id}:{number // AT_ONCE + 1}:{number % AT_ONCE}" for number in range(count)}


OUTPUTS = [f"acted {number}" for number in range(CALLS)]


def test_run_without_crash_has_every_effect_once(attempts: Attempts, memory_path: Path) -> None:
    assert attempts.run(memory_path)
    assert read_effects(memory_path) == Counter(expect_effects())
    assert read_outcome(memory_path) == {"kind": "final", "text": "Done.", "outputs": OUTPUTS}


# Each shard has every kind of step. `make test-slow` runs the others.
SHARDS = [0, *(pytest.param(shard, marks=pytest.mark.slow) for shard in (1, 2, 3, 4))]


@pytest.mark.parametrize("shard", SHARDS)
async def test_run_killed_at_any_step_repeats_only_calls_in_flight(
    attempts: Attempts, memory_path: Path, shard: int
) -> None:
    for kill_at in range(1 + shard, STEPS + 1, len(SHARDS)):
        directory = memory_path / str(kill_at)
        directory.mkdir()
        assert not attempts.run(directory, kill_at=kill_at)
        in_flight = await find_in_flight(directory)
        assert len(in_flight) <= AT_ONCE
        assert attempts.run(directory)
        effects = read_effects(directory)
        assert set(effects) == expect_effects()
        assert {effect for effect, times in effects.items() if times > 1} <= in_flight
        assert max(effects.values()) <= 2
        assert read_outcome(directory) == {"kind": "final", "text": "Done.", "outputs": OUTPUTS}


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, 5))])
async def test_repeatedly_killed_run_finishes(attempts: Attempts, memory_path: Path, seed: int) -> None:
    chance, kills = random.Random(seed), 0
    times: Counter[str] = Counter(expect_effects())
    while not attempts.run(memory_path, kill_at=chance.randint(2, MOST_STEPS)):
        times.update(await find_in_flight(memory_path))
        kills += 1
    assert kills >= STEPS // MOST_STEPS
    effects = read_effects(memory_path)
    assert set(effects) == expect_effects()
    assert all(effects[effect] <= times[effect] for effect in effects)
    assert read_outcome(memory_path) == {"kind": "final", "text": "Done.", "outputs": OUTPUTS}


@pytest.mark.parametrize("seed", range(2))
async def test_run_killed_at_any_moment_finishes(attempts: Attempts, memory_path: Path, seed: int) -> None:
    """Kill from outside at a random time, also during a write."""
    chance = random.Random(seed)
    times: Counter[str] = Counter(expect_effects())
    for _ in range(8):
        attempts.run(memory_path, kill_after=chance.uniform(0.005, 0.08))
        times.update(await find_in_flight(memory_path))
    assert attempts.run(memory_path)
    effects = read_effects(memory_path)
    assert set(effects) == expect_effects()
    assert all(effects[effect] <= times[effect] for effect in effects)
    assert read_outcome(memory_path)["outputs"] == OUTPUTS


@pytest.mark.parametrize(("policy", "verdict"), [("ask", False), ("tell", None)])
async def test_interrupted_call_is_not_repeated_without_approval(
    attempts: Attempts, memory_path: Path, policy: str, verdict: bool | None
) -> None:
    for kill_at in range(6, 40, 4):
        directory = memory_path / str(kill_at)
        directory.mkdir()
        assert not attempts.run(directory, policy=policy, kill_at=kill_at)
        in_flight = await find_in_flight(directory)
        assert attempts.run(directory, policy=policy, verdict=verdict)
        effects = read_effects(directory)
        assert set(effects.values()) == {1}
        assert expect_effects() - set(effects) <= in_flight
        outcome = read_outcome(directory)
        assert outcome["kind"] == "final"
        unknown = sum(INTERRUPTED in output for output in outcome["outputs"])
        assert unknown == len(in_flight)


async def test_interrupted_call_is_repeated_after_approval(attempts: Attempts, memory_path: Path) -> None:
    for kill_at in range(6, 40, 4):
        directory = memory_path / str(kill_at)
        directory.mkdir()
        assert not attempts.run(directory, policy="ask", kill_at=kill_at)
        in_flight = await find_in_flight(directory)
        # If it is killed after the verdict, it asks again: a verdict applies to one attempt.
        attempts.run(directory, policy="ask", verdict=True, kill_at=9)
        in_flight |= await find_in_flight(directory)
        assert attempts.run(directory, policy="ask", verdict=True)
        effects = read_effects(directory)
        assert set(effects) == expect_effects()
        assert {effect for effect, times in effects.items() if times > 1} <= in_flight
        assert read_outcome(directory)["outputs"] == OUTPUTS


@pytest.mark.parametrize("start", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_killed_subagent_resumes(attempts: Attempts, memory_path: Path, start: int) -> None:
    inner = f"{RUN_ID}:1:0"
    for kill_at in range(start, 48, 4):
        directory = memory_path / str(kill_at)
        directory.mkdir()
        if attempts.run(directory, nested=True, kill_at=kill_at):
            break
        in_flight = await find_in_flight(directory, inner)
        assert attempts.run(directory, nested=True)
        effects = read_effects(directory)
        assert set(effects) == expect_effects(inner, AT_ONCE)
        assert {effect for effect, times in effects.items() if times > 1} <= in_flight
        assert read_outcome(directory) == {"kind": "final", "text": "Done.", "outputs": ["Done."]}
    else:
        pytest.fail("it was never left alone")
