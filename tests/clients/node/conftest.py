"""JavaScript clients, in programs of their own, against servers on loopback."""

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
PATIENCE_SECONDS = 60


def environment(folder: Path) -> dict[str, str]:
    """Nothing of whoever runs the tests."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder)}


class Program:
    """A program that plays case after case: to load a client takes longer than most of them."""

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

    def play(self, case: str, server: LiveServer, model: str) -> Any:
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        pipes.stdin.write(json.dumps({"chosen": case, "url": f"{server.url}/v1", "model": model}) + "\n")
        pipes.stdin.flush()
        answers, _, _ = select.select([pipes.stdout], [], [], PATIENCE_SECONDS)
        line = pipes.stdout.readline() if answers else ""
        assert (bool(line), self._log.read_text()) == (True, "")
        outcome = json.loads(line)
        assert "failed" not in outcome, outcome["failed"]
        return outcome.get("told")

    def stop(self) -> None:
        """Without more cases to play it ends by itself."""
        try:
            self._process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            self._process.kill()
        assert self._process.returncode == 0


class Programs:
    """The programs of this folder, beside the packages: that is where node looks for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, Program] = {}
        for program in HERE.glob("*.mjs"):
            shutil.copy(program, folder)
        (folder / "node_modules").symlink_to(PACKAGES)

    def play(self, program: str, case: str, server: LiveServer, *, model: str = "scripted") -> Any:
        """What a case of a program comes to."""
        if program not in self._running:
            self._running[program] = Program(program, self._folder)
        return self._running[program].play(case, server, model)

    def run(self, code: str) -> str:
        """What a program prints that is not of this folder."""
        program = self._folder / "given.mjs"
        program.write_text(code, "utf-8")
        return subprocess.check_output(
            ["node", program.name],
            cwd=self._folder,
            env=environment(self._folder),
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=PATIENCE_SECONDS,
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
