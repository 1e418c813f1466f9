"""Several processes that resume the same run at once: exactly one of them executes it."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.racing_agents import CALLS

ROUNDS = 25


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_one_of_several_processes_resumes_a_run(memory_path: Path, processes: int) -> None:
    folders = [memory_path / str(number) for number in range(ROUNDS)]
    for folder in folders:
        folder.mkdir()
    orders = "".join(json.dumps({"folder": str(folder), "processes": processes}) + "\n" for folder in folders)
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(tests / "support" / "racing_agents.py")],
        input=orders,
        env={**os.environ, "PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout == "done\n" * ROUNDS
    for folder in folders:
        outcomes = [(folder / f"outcome-{number}").read_text().split() for number in range(processes)]
        kinds = Counter(kind for _, kind in outcomes)
        # A process that begins after the end of the run gets its outcome and does nothing.
        assert set(kinds) <= {"final", "RunTaken"}
        assert kinds["final"] >= 1
        effects = [line.split() for line in (folder / "effects").read_text().splitlines()]
        (_, interrupted, key), *others = effects
        # The call that was interrupted is repeated with its key, and everything is done by one process.
        assert [(number, key if number == interrupted else "") for _, number, key in others] == [
            (str(number), key if str(number) == interrupted else "") for number in range(CALLS)
        ]
        assert len({process for process, _, _ in others}) == 1
