"""Virtual environments for the packages we compare with. They are not dependencies of this project."""

import platform
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import ROOT

_FOLDER = ROOT / ".peers"
_SECONDS = 300.0


class PeersUnavailable(Exception):
    """An environment could not be created. The message gives the reason."""


class Environment(NamedTuple):
    """A folder in `.peers`, and the requirements file of its packages in this folder."""

    name: str
    requirements: str

    @property
    def python(self) -> Path:
        return _FOLDER / self.name / "bin" / "python"


AGENTS = Environment("agents", "requirements-peers.txt")
BRIDGE = Environment("bridge", "requirements-peers-bridge.txt")


def prepare(environment: Environment) -> Path:
    """Return the interpreter of an environment. Create the environment if it is missing or out of date."""
    folder = _FOLDER / environment.name
    requirements = Path(__file__).with_name(environment.requirements)
    # Written last, so that an interrupted installation is repeated.
    stamp = folder / "made-for"
    wanted = f"Python {platform.python_version()}\n{requirements.read_text()}"
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"setting up: installing {environment.requirements} into {folder.relative_to(ROOT)} ...", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        install(environment.python, requirements)
        stamp.write_text(wanted)
    return environment.python


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
