"""Runs that are interrupted in every way, at every point, under every policy: no effect is doubled and none is lost.

A call is announced in the ledger (its intent), has its effect, and its result is written. After an interruption another
process resumes the run.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STRUCTURES = ("direct", "subagent", "handoff", "mcp")
POLICIES = ("approval", "retry", "ask", "tell")
INTERRUPTIONS = ("kill", "SIGINT", "cancellation", "lease lost")
POINTS = ("before intent", "after intent", "after effect")
Cell = tuple[str, str, str, str]


def list_cells(structure: str, shard: int) -> list[Cell]:
    """Return a third of the cells of a structure. It has every pair of a policy, an interruption and a point."""
    parts = itertools.product(enumerate(POLICIES), enumerate(INTERRUPTIONS), enumerate(POINTS))
    return [(structure, policy, way, point) for (p, policy), (w, way), (n, point) in parts if (p + w + n) % 3 == shard]


# The structures differ only in the path to the tool. `make test` runs all cells of the plain one and a third of the
# others, `make test-slow` runs the rest.
CASES = [
    pytest.param("direct", (0, 1, 2), id="direct"),
    *(pytest.param(structure, (0,), id=structure) for structure in STRUCTURES[1:]),
    *(pytest.param(structure, (1, 2), id=f"{structure}-rest", marks=pytest.mark.slow) for structure in STRUCTURES[1:]),
]


def test_matrix_has_every_combination() -> None:
    cells = [cell for case in CASES for shard in case.values[1] for cell in list_cells(case.values[0], shard)]
    assert (len(cells), set(cells)) == (192, set(itertools.product(STRUCTURES, POLICIES, INTERRUPTIONS, POINTS)))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_third_of_the_matrix_has_every_pair(structure: str) -> None:
    pairs = {pair for cell in list_cells(structure, 0) for pair in itertools.combinations(cell[1:], 2)}
    assert len(pairs) == 4 * 4 + 4 * 3 + 4 * 3


@pytest.mark.parametrize(("structure", "shards"), CASES)
def test_interrupted_call_has_one_key_and_no_doubled_effect(
    memory_path: Path, structure: str, shards: tuple[int, ...]
) -> None:
    """The cells of a structure are in one test, because they share a process that has imported everything."""
    if structure == "mcp":
        pytest.importorskip("mcp")
    cells = [cell for shard in shards for cell in list_cells(structure, shard)]
    folders = [memory_path / str(number) for number in range(len(cells))]
    orders = []
    for folder, cell in zip(folders, cells, strict=True):
        folder.mkdir()
        orders.append({"folder": str(folder)} | dict(zip(("structure", "policy", "way", "point"), cell, strict=True)))
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(tests / "support" / "interrupted_agents.py")],
        input="".join(json.dumps(order) + "\n" for order in orders),
        env={**os.environ, "PYTHONPATH": str(tests)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    answers = done.stdout.splitlines()
    faults = [
        (cell, fault)
        for folder, cell, answer in zip(folders, cells, answers, strict=True)
        if (fault := find_fault(folder, cell, answer))
    ]
    assert faults == []


def find_fault(folder: Path, cell: Cell, answer: str) -> str:
    """Return a description of what is wrong with the outcome of a cell, if anything is."""
    _, policy, way, point = cell
    first, outcome = answer.split()
    effects = (folder / "effects").read_text().splitlines() if (folder / "effects").exists() else []
    if outcome != "final":
        return f"the run ended with {outcome}"
    if len(set(effects)) > 1:
        return f"the call got several keys: {effects}"
    # A cancellation takes effect when the tasks run again, which may be after the next step.
    if way in ("kill", "lease lost") and point == "before intent" and first != "0":
        return "the process had an effect after the interruption"
    if way in ("kill", "lease lost") and point == "after effect" and first != "1":
        return "the interruption came at another point"
    # With "retry" the receiver of the calls recognizes the key. With "tell" the model reads it and decides.
    most, least = (2 if policy == "retry" else 1), (0 if policy == "tell" else 1)
    return "" if least <= len(effects) <= most else f"it had {len(effects)} effects"
