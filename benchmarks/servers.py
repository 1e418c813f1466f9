"""The servers under test, each in a process of its own. The first one is the base of the ratios."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import batch_backend
from benchmarks.client import HOST, is_up
from benchmarks.workloads import ANSWERS, IDLE

ROOT = Path(__file__).resolve().parent.parent
_START_SECONDS = 30.0
_STOP_SECONDS = 10.0


class ProcessFailed(Exception):
    """A process exited or did not answer. The message contains its output."""


class Server(NamedTuple):
    """A server to start. `prepare` takes a folder for the server and a port, and returns the command.

    `environment` has further environment variables. If `cores` are given, the server runs on these only.
    """

    name: str
    ready_path: str
    prepare: Callable[[Path, int], list[str]]
    start_timeout: float = _START_SECONDS
    environment: Mapping[str, str] = {}
    cores: Collection[int] = ()


def _prepare_skeleton(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.skeleton", str(port)]


def _prepare_antiphon(folder: Path, port: int) -> list[str]:
    """Default settings (access log, store in a file), except for the number of background slots."""
    rules = [
        {"model": model, "answers": [_make_steps(pieces)]}
        for model, pieces in ANSWERS.items()
        if model not in batch_backend.MODELS
    ]
    rules.append({"model": IDLE, "answers": [[{"text": "Wait."}, {"wait": "for ever"}]]})
    script = {"models": [rule["model"] for rule in rules], "rules": rules}
    (folder / "script.json").write_text(json.dumps(script))
    (folder / "antiphon.toml").write_text(
        f'data_dir = "{folder}"\nbackground_slots = 1000\n'
        f'[backends.scripted]\nkind = "scripted"\nscript = "{folder}/script.json"\n'
        f'[backends.batches]\nkind = "{batch_backend.KIND}"\n'
    )
    # Backends are entry points of installed packages. These two files make the folder a package.
    package = folder / "benchmark_batches-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: benchmark-batches\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        f"[antiphon.backends]\n{batch_backend.KIND} = benchmarks.batch_backend:create\n"
    )
    return make_antiphon_command(folder, port)


def _make_steps(reads: list[list[str]]) -> list[dict[str, object]]:
    """Return one step per read, with one event-loop iteration between them, as with a real upstream."""
    steps: list[dict[str, object]] = []
    for pieces in reads:
        steps += [{"text": pieces}, {"delay": 0}]
    return steps if len(reads) > 1 else steps[:1]


def make_antiphon_command(folder: Path, port: int) -> list[str]:
    """Return the command of our server, with the settings in this folder."""
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


class RunningServer(NamedTuple):
    """A running server. `started` is the time until its first answer, in seconds."""

    name: str
    port: int
    pid: int
    started: float

    @property
    def cpu(self) -> float:
        """CPU time of all threads, in seconds."""
        return read_cpu(self.pid)

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        return read_megabytes(self.pid)


def read_cpu(pid: int) -> float:
    """Return the CPU time of all threads of a process, in seconds."""
    # The Linux id of a process's CPU clock. /proc counts in hundredths of a second, which is too coarse.
    return time.clock_gettime((~pid << 3) | 2)


def read_megabytes(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def list_children(pid: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@contextlib.asynccontextmanager
async def start_server(server: Server, folder: Path) -> AsyncIterator[RunningServer]:
    """Start a server in a new folder, and stop it on exit."""
    port = find_free_port()
    with _start_process(server, folder, port) as process:
        began = time.perf_counter()
        while not await is_up(port, server.ready_path):
            if process.poll() is not None or time.perf_counter() - began > server.start_timeout:
                raise ProcessFailed(f"{server.name} did not start:\n{_read_log(folder)}")
            await asyncio.sleep(0.002)
        yield RunningServer(server.name, port, process.pid, time.perf_counter() - began)


@contextlib.contextmanager
def _start_process(server: Server, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir()
    command = server.prepare(folder, port)
    if server.cores:
        command = ["taskset", "--cpu-list", ",".join(map(str, server.cores)), *command]
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=make_environment(folder) | server.environment,
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
    """Return the environment of a process in this folder, without Antiphon settings and proxies."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANTIPHON_")}
    environment = {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}
    # Installed packages have cached bytecode. Ours is cached by the first start.
    return environment | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "PYTHONDONTWRITEBYTECODE": ""}


def _read_log(folder: Path) -> str:
    return (folder / "output.log").read_text(errors="replace")[-4000:]


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
