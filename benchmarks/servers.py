"""The servers that are compared, each a process of its own with a start command. The first one is the measure."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import replay
from benchmarks.client import HOST, is_up
from benchmarks.workloads import ANSWERS, IDLE

ROOT = Path(__file__).resolve().parent.parent
_START_SECONDS = 30.0
_STOP_SECONDS = 10.0


class DidNotStart(Exception):
    """A server's process ended or stayed silent; the message holds what it wrote."""


class Server(NamedTuple):
    """`prepare` is given a folder of the server's own and a port, and returns the command."""

    name: str
    ready_path: str
    prepare: Callable[[Path, int], list[str]]
    patience: float = _START_SECONDS


def _prepare_skeleton(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.skeleton", str(port)]


def _prepare_antiphon(folder: Path, port: int) -> list[str]:
    """With the settings of every day, but for the places in the background: an access log, and a store in a file."""
    rules = [
        {"model": model, "answers": [_steps(pieces)]} for model, pieces in ANSWERS.items() if model not in replay.MODELS
    ]
    rules.append({"model": IDLE, "answers": [[{"text": "Wait."}, {"wait": "for ever"}]]})
    script = {"models": [rule["model"] for rule in rules], "rules": rules}
    (folder / "script.json").write_text(json.dumps(script))
    (folder / "antiphon.toml").write_text(
        f'data_dir = "{folder}"\nbackground_slots = 1000\n'
        f'[backends.scripted]\nkind = "scripted"\nscript = "{folder}/script.json"\n'
        f'[backends.replay]\nkind = "{replay.KIND}"\n'
    )
    # Backends are found through the entry points of installed packages. This is all that makes a folder one.
    package = folder / "benchmark_replay-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: benchmark-replay\nVersion: 0\n")
    (package / "entry_points.txt").write_text(f"[antiphon.backends]\n{replay.KIND} = benchmarks.replay:create\n")
    return serve_antiphon(folder, port)


def _steps(reads: list[list[str]]) -> list[dict[str, object]]:
    """A step for each read, and a turn of the event loop between them, as between the reads of a real upstream."""
    steps: list[dict[str, object]] = []
    for pieces in reads:
        steps += [{"text": pieces}, {"delay": 0}]
    return steps if len(reads) > 1 else steps[:1]


def serve_antiphon(folder: Path, port: int) -> list[str]:
    """The command for our server, with the settings in this folder."""
    start = "import sys; from antiphon.cli.main import main; sys.exit(main())"
    config = str(folder / "antiphon.toml")
    return [sys.executable, "-c", start, "serve", "--config", config, "--host", HOST, "--port", str(port)]


SERVERS = (
    Server("skeleton", "/", _prepare_skeleton),
    Server("antiphon", "/readyz", _prepare_antiphon),
)


def _prepare_upstream(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.upstream", str(port)]


UPSTREAM = Server("upstream", "/", _prepare_upstream)


class Running(NamedTuple):
    """A started server, and what its process has used so far. `started` is the seconds until it answered."""

    name: str
    port: int
    pid: int
    started: float

    @property
    def cpu(self) -> float:
        """Seconds on a core, of all threads together."""
        # Linux numbers the CPU clocks of processes so; /proc counts in hundredths of a second, too coarse here.
        return time.clock_gettime((~self.pid << 3) | 2)

    @property
    def megabytes(self) -> float:
        """The memory that is resident."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.asynccontextmanager
async def run(server: Server, folder: Path) -> AsyncIterator[Running]:
    """Start a server in a new folder; stop it on the way out, whatever happens."""
    port = _free_port()
    with _process(server, folder, port) as process:
        began = time.perf_counter()
        while not await is_up(port, server.ready_path):
            if process.poll() is not None or time.perf_counter() - began > server.patience:
                raise DidNotStart(f"{server.name} did not start:\n{_read_log(folder)}")
            await asyncio.sleep(0.002)
        yield Running(server.name, port, process.pid, time.perf_counter() - began)


@contextlib.contextmanager
def _process(server: Server, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir()
    command = server.prepare(folder, port)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=make_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def make_environment(folder: Path) -> dict[str, str]:
    """The environment of a process that works in this folder: without settings of ours, and without proxies."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANTIPHON_")}
    kept = {name: value for name, value in kept.items() if not name.lower().endswith("_proxy")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def _read_log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-4000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
