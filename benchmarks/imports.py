"""How long imports take, each in an interpreter of its own, beside the import of msgspec."""

import subprocess
import sys

BASE = "msgspec"
MODULES = ("antiphon", "antiphon.protocol.codec", "antiphon.server.process")
_SECONDS = 30.0


def measure(*, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each module, pairs of milliseconds: msgspec's and its own."""
    found: dict[str, list[tuple[float, float]]] = {module: [] for module in MODULES}
    for _ in range(rounds):
        base = _time(BASE)
        for module in MODULES:
            found[module].append((base, _time(module)))
    return found


def _time(module: str) -> float:
    code = f"import time; began = time.perf_counter(); import {module}; print(time.perf_counter() - began)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=_SECONDS, text=True)
    return float(done.stdout) * 1e3
