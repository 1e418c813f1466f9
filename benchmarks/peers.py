"""What we are compared with, in environments of its own. Nothing of it is a dependency of this project."""

import platform
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import ROOT

_FOLDER = ROOT / ".peers"
_SECONDS = 300.0


class Missing(Exception):
    """An environment could not be made; the message says why."""


class Environment(NamedTuple):
    """A folder of `.peers`, and the file beside this one that lists what it holds."""

    name: str
    requirements: str

    @property
    def python(self) -> Path:
        return _FOLDER / self.name / "bin" / "python"


AGENTS = Environment("agents", "requirements-peers.txt")
BRIDGE = Environment("bridge", "requirements-peers-bridge.txt")


def prepare(environment: Environment) -> Path:
    """The interpreter of an environment, which is made if it is not there, or not as it should be."""
    folder = _FOLDER / environment.name
    requirements = Path(__file__).with_name(environment.requirements)
    # Written last, so that an interrupted set-up starts over.
    stamp = folder / "made-for"
    wanted = f"Python {platform.python_version()}\n{requirements.read_text()}"
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"setting up: installing {environment.requirements} into {folder.relative_to(ROOT)} ...", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        install(environment.python, requirements)
        stamp.write_text(wanted)
    return environment.python


def install(python: Path, requirements: Path) -> None:
    """Into the environment of this interpreter, or raise Missing."""
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries=1", "--timeout=15"]
    command = [str(python), "-m", "pip", "install", *options, "--only-binary=:all:", f"--requirement={requirements}"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS, text=True)
    except subprocess.TimeoutExpired:
        raise Missing(f"installing {requirements.name} took more than {_SECONDS:g} seconds") from None
    if done.returncode:
        told = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = told[-1] if told else "no reason"
        raise Missing(
            f"{requirements.name} cannot be installed (is the package index within reach? pip says: {reason})"
        )
