"""JavaScript clients, in node processes, against local servers."""

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.live_server import LiveServer

HERE = Path(__file__).parent
PACKAGES = HERE.parents[2] / ".node/node/node_modules"
WAIT_SECONDS = 60


def environment(folder: Path) -> dict[str, str]:
    """Return an environment without the variables of the user."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder)}


class Program:
    """A node process that runs one case after the other, because importing a client is slow."""

    def __init__(self, name: str, folder: Path) -> None:
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                ["node", f"{name}.mjs"],
                cwd=folder,
                env=environment(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run_case(self, case: str, server: LiveServer, model: str) -> Any:
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        pipes.stdin.write(json.dumps({"name": case, "url": f"{server.url}/v1", "model": model}) + "\n")
        pipes.stdin.flush()
        readable, _, _ = select.select([pipes.stdout], [], [], WAIT_SECONDS)
        line = pipes.stdout.readline() if readable else ""
        assert (bool(line), self._log.read_text()) == (True, "")
        outcome = json.loads(line)
        assert "error" not in outcome, outcome["error"]
        return outcome.get("result")

    def stop(self) -> None:
        """Close its input, which ends the process."""
        try:
            self._process.communicate(timeout=WAIT_SECONDS)
        finally:
            self._process.kill()
        assert self._process.returncode == 0


class Programs:
    """The programs of this folder, copied next to `node_modules`, where node looks for packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, Program] = {}
        for program in HERE.glob("*.mjs"):
            shutil.copy(program, folder)
        (folder / "node_modules").symlink_to(PACKAGES)

    def run_case(self, program: str, case: str, server: LiveServer, *, model: str = "scripted") -> Any:
        """Run a case of a program and return its result."""
        if program not in self._running:
            self._running[program] = Program(program, self._folder)
        return self._running[program].run_case(case, server, model)

    def run(self, code: str) -> str:
        """Run other code and return its output."""
        program = self._folder / "snippet.mjs"
        program.write_text(code, "utf-8")
        return subprocess.check_output(
            ["node", program.name],
            cwd=self._folder,
            env=environment(self._folder),
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=WAIT_SECONDS,
        )

    def stop(self) -> None:
        for program in self._running.values():
            program.stop()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    if not PACKAGES.exists() or shutil.which("node") is None:
        pytest.skip("The JavaScript clients are not installed: make test-clients installs them, if there is node")
    programs = Programs(tmp_path_factory.mktemp("programs"))
    yield programs
    programs.stop()
