"""Time and memory of imports, each in a new interpreter."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BASE = "msgspec"
MODULES = ("antiphon", "antiphon.protocol.codec", "antiphon.server.process")
_SECONDS = 30.0
# Installed packages have cached bytecode. Ours is cached by the first round.
_ENVIRONMENT = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}


def measure(*, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return pairs of milliseconds for each module: for msgspec, and for the module."""
    found: dict[str, list[tuple[float, float]]] = {module: [] for module in MODULES}
    for _ in range(rounds):
        base = _time(f"import {BASE}")
        for module in MODULES:
            found[module].append((base, _time(f"import {module}")))
    return found


def measure_time(statements: Mapping[str, tuple[Path, str]], *, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each statement, run in its interpreter. The statements take turns."""
    found: dict[str, list[float]] = {name: [] for name in statements}
    for number in range(rounds + 1):  # the first round fills the file cache
        for name, (python, statement) in statements.items():
            took = _time(statement, python)
            if number:
                found[name].append(took)
    return found


def measure_memory(statements: Mapping[str, tuple[Path, str]], *, rounds: int) -> dict[str, list[float]]:
    """Return the megabytes that each statement adds to its interpreter."""
    return {
        name: [_measure_memory(statement, python) for _ in range(rounds)]
        for name, (python, statement) in statements.items()
    }


def _measure_memory(statement: str, python: Path) -> float:
    read = "int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')"
    code = f"import os; before = {read}; {statement}; print({read} - before)"
    return _run(python, code) / 2**20


def _time(statement: str, python: Path = Path(sys.executable)) -> float:
    code = f"import time; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
    return _run(python, code) * 1e3


def _run(python: Path, code: str) -> float:
    """Return the number that the code prints."""
    command = [python, "-c", code]
    done = subprocess.run(command, capture_output=True, check=True, timeout=_SECONDS, text=True, env=_ENVIRONMENT)
    return float(done.stdout)
