"""How long imports take, each in an interpreter of its own."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BASE = "msgspec"
MODULES = ("antiphon", "antiphon.protocol.codec", "antiphon.server.process")
_SECONDS = 30.0


def measure(*, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each module, pairs of milliseconds: msgspec's and its own."""
    found: dict[str, list[tuple[float, float]]] = {module: [] for module in MODULES}
    for _ in range(rounds):
        base = _time(f"import {BASE}")
        for module in MODULES:
            found[module].append((base, _time(f"import {module}")))
    return found


def compare(statements: Mapping[str, tuple[Path, str]], *, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by name, in turns, of statements that each have an interpreter to run in."""
    found: dict[str, list[float]] = {name: [] for name in statements}
    for number in range(rounds + 1):  # the first one reads the files from the disk
        for name, (python, statement) in statements.items():
            took = _time(statement, python)
            if number:
                found[name].append(took)
    return found


def weigh(statements: Mapping[str, tuple[Path, str]], *, rounds: int) -> dict[str, list[float]]:
    """Megabytes by name that the same statements add to an interpreter."""
    return {
        name: [_weigh(statement, python) for _ in range(rounds)] for name, (python, statement) in statements.items()
    }


def _weigh(statement: str, python: Path) -> float:
    read = "int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')"
    code = f"import os; before = {read}; {statement}; print({read} - before)"
    done = subprocess.run([python, "-c", code], capture_output=True, check=True, timeout=_SECONDS, text=True)
    return float(done.stdout) / 2**20


def _time(statement: str, python: Path = Path(sys.executable)) -> float:
    code = f"import time; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
    done = subprocess.run([python, "-c", code], capture_output=True, check=True, timeout=_SECONDS, text=True)
    return float(done.stdout) * 1e3
