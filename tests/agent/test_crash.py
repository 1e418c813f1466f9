"""Nothing lost, nothing twice: a run whose process is killed, at any step and at any moment, and resumed each time."""

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
# Two for each entry (a run of 12 calls, 3 at once, has 31: its beginning, 5 turns, 2 for each call, and its end), and
# two for each effect.
STEPS = 86
# That an attempt may take, of those that are killed again and again.
MOST_STEPS = 25


class Nursery:
    """Where attempts are started."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "support" / "crashing_agent.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def attempt(self, directory: Path, **order: Any) -> bool:
        """Whether the attempt came to its end."""
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
def nursery() -> Iterator[Nursery]:
    opened = Nursery()
    yield opened
    opened.close()


def read_effects(directory: Path) -> Counter[str]:
    path = directory / "effects"
    return Counter(path.read_text().splitlines() if path.exists() else ())


def read_outcome(directory: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((directory / "outcome").read_text())
    return told


async def find_in_flight(directory: Path, run_id: str = RUN_ID) -> set[str]:
    """The effects that were about to happen, as far as the ledger knows, and may have happened or not."""
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
    """Each under its own key."""
    return {f"{number} {run_id}:{number // AT_ONCE + 1}:{number % AT_ONCE}" for number in range(count)}


OUTPUTS = [f"acted {number}" for number in range(CALLS)]


def test_without_a_crash_every_effect_happens_once(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.attempt(tmp_path)
    assert read_effects(tmp_path) == Counter(expect_effects())
    assert read_outcome(tmp_path) == {"kind": "final", "text": "Done.", "outputs": OUTPUTS}


@pytest.mark.parametrize("shard", range(3))
async def test_killed_at_any_step_every_effect_happens_once_but_those_in_flight(
    nursery: Nursery, tmp_path: Path, shard: int
) -> None:
    for kill_at in range(1 + shard, STEPS + 1, 3):
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        assert not nursery.attempt(directory, kill_at=kill_at)
        in_flight = await find_in_flight(directory)
        assert len(in_flight) <= AT_ONCE
        assert nursery.attempt(directory)
        effects = read_effects(directory)
        assert set(effects) == expect_effects()
        assert {effect for effect, times in effects.items() if times > 1} <= in_flight
        assert max(effects.values()) <= 2
        assert read_outcome(directory) == {"kind": "final", "text": "Done.", "outputs": OUTPUTS}


@pytest.mark.parametrize("seed", range(6))
async def test_killed_again_and_again_it_comes_to_its_end(nursery: Nursery, tmp_path: Path, seed: int) -> None:
    chance, kills = random.Random(seed), 0
    times: Counter[str] = Counter(expect_effects())
    while not nursery.attempt(tmp_path, kill_at=chance.randint(2, MOST_STEPS)):
        times.update(await find_in_flight(tmp_path))
        kills += 1
    assert kills >= STEPS // MOST_STEPS
    effects = read_effects(tmp_path)
    assert set(effects) == expect_effects()
    assert all(effects[effect] <= times[effect] for effect in effects)
    assert read_outcome(tmp_path) == {"kind": "final", "text": "Done.", "outputs": OUTPUTS}


@pytest.mark.parametrize("seed", range(2))
async def test_killed_at_any_moment_it_comes_to_its_end(nursery: Nursery, tmp_path: Path, seed: int) -> None:
    """From outside, wherever it is: in the middle of writing, too."""
    chance = random.Random(seed)
    times: Counter[str] = Counter(expect_effects())
    for _ in range(8):
        nursery.attempt(tmp_path, kill_after=chance.uniform(0.005, 0.08))
        times.update(await find_in_flight(tmp_path))
    assert nursery.attempt(tmp_path)
    effects = read_effects(tmp_path)
    assert set(effects) == expect_effects()
    assert all(effects[effect] <= times[effect] for effect in effects)
    assert read_outcome(tmp_path)["outputs"] == OUTPUTS


@pytest.mark.parametrize(("policy", "verdict"), [("ask", False), ("tell", None)])
async def test_what_must_not_happen_twice_does_not(
    nursery: Nursery, tmp_path: Path, policy: str, verdict: bool | None
) -> None:
    for kill_at in range(6, 40, 4):
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        assert not nursery.attempt(directory, policy=policy, kill_at=kill_at)
        in_flight = await find_in_flight(directory)
        assert nursery.attempt(directory, policy=policy, verdict=verdict)
        effects = read_effects(directory)
        assert set(effects.values()) == {1}
        assert expect_effects() - set(effects) <= in_flight
        told = read_outcome(directory)
        assert told["kind"] == "final"
        unknown = sum(INTERRUPTED in output for output in told["outputs"])
        assert unknown == len(in_flight)


async def test_who_is_asked_may_have_it_done_again(nursery: Nursery, tmp_path: Path) -> None:
    for kill_at in range(6, 40, 4):
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        assert not nursery.attempt(directory, policy="ask", kill_at=kill_at)
        in_flight = await find_in_flight(directory)
        # Killed once more after the answer, it asks once more: one answer is for one attempt.
        nursery.attempt(directory, policy="ask", verdict=True, kill_at=9)
        in_flight |= await find_in_flight(directory)
        assert nursery.attempt(directory, policy="ask", verdict=True)
        effects = read_effects(directory)
        assert set(effects) == expect_effects()
        assert {effect for effect, times in effects.items() if times > 1} <= in_flight
        assert read_outcome(directory)["outputs"] == OUTPUTS


async def test_an_agent_that_works_for_another_goes_on_too(nursery: Nursery, tmp_path: Path) -> None:
    inner = f"{RUN_ID}:1:0"
    for kill_at in range(1, 44, 2):
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        if nursery.attempt(directory, nested=True, kill_at=kill_at):
            break
        in_flight = await find_in_flight(directory, inner)
        assert nursery.attempt(directory, nested=True)
        effects = read_effects(directory)
        assert set(effects) == expect_effects(inner, AT_ONCE)
        assert {effect for effect, times in effects.items() if times > 1} <= in_flight
        assert read_outcome(directory) == {"kind": "final", "text": "Done.", "outputs": ["Done."]}
    else:
        pytest.fail("it was never left alone")
