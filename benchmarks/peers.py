"""Virtual environments for the packages we compare with. They are not dependencies of this project."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import ROOT

_FOLDER = ROOT / ".peers"
_SECONDS = 300.0


class PeersUnavailable(Exception):
    """An environment could not be created. The message gives the reason."""


class Environment(NamedTuple):
    """A folder in `.peers`, and the requirements file of its packages in this folder.

    `minimum` is the oldest Python that the packages support.
    """

    name: str
    requirements: str
    minimum: tuple[int, int] = (3, 11)

    @property
    def folder(self) -> Path:
        return _FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


AGENTS = Environment("agents", "requirements-peers.txt")
BRIDGE = Environment("bridge", "requirements-peers-bridge.txt")
OGX = Environment("ogx", "requirements-peers-ogx.txt", minimum=(3, 12))
OPEN_RESPONSES_SERVER = Environment("open-responses-server", "requirements-peers-open-responses-server.txt")
AGENTIC_API = Environment("agentic-api", "requirements-peers-agentic-api.txt")


def prepare(environment: Environment) -> Path:
    """Return the interpreter of an environment. Create the environment if it is missing or out of date.

    Raises PeersUnavailable.
    """
    folder = environment.folder
    requirements = Path(__file__).with_name(environment.requirements)
    base = find_python(environment.minimum)
    # Written last, so that an interrupted installation is repeated.
    stamp = folder / "made-for"
    wanted = f"{_read_version(base)}\n{requirements.read_text()}"
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"setting up: installing {environment.requirements} into {folder.relative_to(ROOT)} ...", file=sys.stderr)
        try:
            subprocess.run(
                [base, "-m", "venv", "--clear", str(folder)], capture_output=True, check=True, timeout=_SECONDS
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise PeersUnavailable(f"no environment can be created with {base.name}: {error}") from None
        install(environment.python, requirements)
        stamp.write_text(wanted)
    return environment.python


def find_python(minimum: tuple[int, int]) -> Path:
    """Return this interpreter if it is new enough, else one from the path or from pyenv. Raises PeersUnavailable."""
    if sys.version_info[:2] >= minimum:
        return Path(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in range(minimum[1], 15):
        name = f"python{minimum[0]}.{minor}"
        on_path = shutil.which(name)
        found = [Path(on_path)] if on_path else []
        for python in (*found, *sorted(pyenv.glob(f"versions/*/bin/{name}"))):
            if _read_version(python):
                return python
    raise PeersUnavailable(f"it needs Python {minimum[0]}.{minimum[1]} or newer, and none was found")


def _read_version(python: Path) -> str:
    """Return the version of an interpreter, or nothing if it does not run: pyenv has stubs for versions not in use."""
    try:
        done = subprocess.run([python, "--version"], capture_output=True, check=False, timeout=30, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def install(python: Path, requirements: Path) -> None:
    """Install the requirements for this interpreter. Raises PeersUnavailable."""
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries=1", "--timeout=15"]
    command = [str(python), "-m", "pip", "install", *options, "--only-binary=:all:", f"--requirement={requirements}"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS, text=True)
    except subprocess.TimeoutExpired:
        raise PeersUnavailable(f"installing {requirements.name} took more than {_SECONDS:g} seconds") from None
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1] if errors else "no reason given"
        raise PeersUnavailable(
            f"{requirements.name} cannot be installed (is the package index reachable? pip: {reason})"
        )
