"""Several processes on one store: workers on SQLite and nodes on PostgreSQL, against one process of each.

The client shares the machine with the servers. PostgreSQL has its default settings, so its commits are on disk, as
those of SQLite are.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.client import Client, InvalidAnswer, get, post
from benchmarks.report import Row, make_count_row, make_row
from benchmarks.servers import (
    ROOT,
    RunningServer,
    Server,
    list_children,
    make_antiphon_command,
    read_cpu,
    start_server,
)

RATES = "responses a second, stored, 32 at once"
CPU = "CPU of all server processes, ms a response"
_RESPONSES = 320
_CONCURRENCY = 32
_SECONDS = 60.0
# The answer of a response whose process is killed takes this long.
_HELD_SECONDS = 1.0
_HELD = 8
# A node that has just started does not judge others for some seconds.
_SETTLED_SECONDS = 6.0
TAKEOVERS = f"kill -9 with {_HELD} responses of {_HELD_SECONDS:g} s: seconds until all have ended"
_COLUMNS = ("one process", "two processes")
_SCRIPT = {
    "models": ["short", "held"],
    "rules": [{"model": "held", "answers": [[{"text": "Wait."}, {"delay": _HELD_SECONDS}]]}],
    "default": "The evening train leaves from the usual platform.",
}


class Setup(NamedTuple):
    """Processes that share a store: workers of one server, or nodes. `lease` is in seconds.

    `slots` is the number of background responses that a process runs at once.
    """

    name: str
    store: str
    lease: float
    workers: int = 1
    nodes: int = 1
    slots: int = 1000


class Cluster:
    """The running servers of a setup, and a client for each."""

    def __init__(self, setup: Setup, servers: Sequence[RunningServer]) -> None:
        self.setup = setup
        self.servers = servers
        self.clients: list[Client] = []
        self.reconnect()

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def reconnect(self) -> None:
        """Use new connections: a process that was killed has reset its own."""
        self.close()
        self.clients = [Client(server.port) for server in self.servers]

    def list_processes(self) -> list[int]:
        """Return the process ids of the servers and their workers."""
        return [pid for server in self.servers for pid in (server.pid, *list_children(server.pid))]

    def read_cpu(self) -> float:
        """Return the CPU time of all processes, in seconds."""
        return sum(map(read_cpu, self.list_processes()))

    async def send(self, body: dict[str, Any], count: int) -> list[str]:
        """Send a request so many times, in equal parts to the nodes. Return the ids of the responses."""
        request = post(json.dumps(body).encode())
        parts = len(self.clients)
        answers = await asyncio.gather(
            *(
                client.load(request, count=count // parts, concurrency=_CONCURRENCY // parts, seconds=_SECONDS)
                for client in self.clients
            )
        )
        found = [json.loads(answer.content) for part in answers for answer in part]
        if any("id" not in each or each["status"] not in ("queued", "completed") for each in found):
            raise InvalidAnswer(f"{self.setup.name} gave a wrong answer: {found[0]}")
        return [each["id"] for each in found]

    async def wait_for(self, ids: Sequence[str], status: str) -> None:
        """Wait until all responses have this status, on the last node."""
        deadline = time.perf_counter() + _SECONDS
        for response_id in ids:
            while await self._read_status(response_id) != status:
                if time.perf_counter() > deadline:
                    raise InvalidAnswer(f"{self.setup.name}: a response is not {status} after {_SECONDS:g} seconds.")
                await asyncio.sleep(0.01)

    async def _read_status(self, response_id: str) -> str:
        answer = await self.clients[-1].send(get(f"/v1/responses/{response_id}"))
        status: str = json.loads(answer.content)["status"]
        return status


class Sample(NamedTuple):
    """Responses per second, and CPU milliseconds of all processes per response."""

    rate: float
    cpu: float


class Kind(NamedTuple):
    """One process and two on a store, and the end of one of the two."""

    name: str
    setups: tuple[Setup, Setup]
    takeover: str
    kill: Callable[[Cluster], None]


async def measure(
    folder: Path, *, rounds: int, scale: float, kills: int, lease: float
) -> tuple[list[list[Row]], list[str]]:
    """Return the tables, and a note if there is no PostgreSQL."""
    folder = folder / "nodes"
    _make_folder(folder)
    one, two = (Setup(f"SQLite-{count}", f"sqlite:///{folder}/{count}.db", lease, workers=count) for count in (1, 2))
    kinds = [Kind("SQLite, workers", (one, two), "SQLite, another worker", _kill_worker)]
    notes: list[str] = []
    rows: list[Row] = []
    takeovers: list[Row] = []
    with _make_databases() as urls:
        if urls is None:
            notes.append("nodes: without PostgreSQL, because the extras are not installed")
        else:
            one, two = (Setup(f"PostgreSQL-{number}", url, lease, nodes=number) for number, url in enumerate(urls, 1))
            kinds.append(Kind("PostgreSQL, nodes", (one, two), "PostgreSQL, another node", _kill_node))
        section = (
            f"kill -9 with {_HELD} responses of {_HELD_SECONDS:g} s: seconds until all have ended (lease: {lease:g})"
        )
        for kind in kinds:
            rows += await _measure_kind(kind, folder, rounds=rounds, scale=scale)
            # Each process holds half of the responses.
            setup = kind.setups[1]._replace(slots=_HELD // 2)
            seconds: list[float] = []
            for number in range(kills):
                async with start_cluster(setup, folder / f"{setup.name}-{number}") as cluster:
                    await asyncio.sleep(min(_SETTLED_SECONDS, lease))
                    seconds.append(await _measure_takeover(cluster, kind.kill))
            takeovers.append(make_count_row(section, kind.takeover, {"seconds": statistics.median(seconds)}))
    rows.sort(key=lambda row: row.section != RATES)
    return [rows, takeovers], notes


async def _measure_kind(kind: Kind, folder: Path, *, rounds: int, scale: float) -> list[Row]:
    """Measure one process and two, foreground and background, in turns."""
    count = max(_CONCURRENCY, round(_RESPONSES * scale) // 2 * 2)
    found: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    async with contextlib.AsyncExitStack() as stack:
        clusters = [await stack.enter_async_context(start_cluster(setup, folder / setup.name)) for setup in kind.setups]
        for cluster in clusters:
            await cluster.send({"model": "short", "input": "Hi"}, _CONCURRENCY)
        for _ in range(rounds):
            for name, work in (("foreground", _run_foreground), ("background", _run_background)):
                for cluster, column in zip(clusters, _COLUMNS, strict=True):
                    found[name][column].append(await _take_sample(cluster, work, count))
    return [
        make_row(section, f"{kind.name}, {name}", {column: list(map(read, taken)) for column, taken in samples.items()})
        for section, read in ((RATES, attrgetter("rate")), (CPU, attrgetter("cpu")))
        for name, samples in found.items()
    ]


async def _take_sample(cluster: Cluster, work: Callable[[Cluster, int], Awaitable[None]], count: int) -> Sample:
    cpu, began = cluster.read_cpu(), time.perf_counter()
    await work(cluster, count)
    return Sample(count / (time.perf_counter() - began), (cluster.read_cpu() - cpu) * 1000 / count)


async def _run_foreground(cluster: Cluster, count: int) -> None:
    await cluster.send({"model": "short", "input": "Hi"}, count)


async def _run_background(cluster: Cluster, count: int) -> None:
    ids = await cluster.send({"model": "short", "input": "Hi", "background": True}, count)
    await cluster.wait_for(ids, "completed")


async def _measure_takeover(cluster: Cluster, kill: Callable[[Cluster], None]) -> float:
    """Return the time from a kill until all background responses have ended."""
    ids = await cluster.send({"model": "held", "input": "Hi", "background": True}, _HELD)
    await cluster.wait_for(ids, "in_progress")
    began = time.perf_counter()
    kill(cluster)
    cluster.reconnect()
    await cluster.wait_for(ids, "completed")
    return time.perf_counter() - began


def _kill_worker(cluster: Cluster) -> None:
    os.kill(list_children(cluster.servers[0].pid)[0], signal.SIGKILL)


def _kill_node(cluster: Cluster) -> None:
    os.kill(cluster.servers[0].pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def start_cluster(setup: Setup, folder: Path) -> AsyncIterator[Cluster]:
    """Start the servers of a setup, and stop them on exit."""
    _make_folder(folder)

    def prepare(own: Path, port: int) -> list[str]:
        (own / "script.json").write_text(json.dumps(_SCRIPT))
        (own / "antiphon.toml").write_text(
            f'data_dir = "{folder}"\nstore = "{setup.store}"\nworkers = {setup.workers}\nlog_level = "warning"\n'
            f"background_lease_seconds = {setup.lease}\nbackground_slots = {setup.slots}\n"
            f'[backends.scripted]\nkind = "scripted"\nscript = "{own}/script.json"\n'
        )
        return make_antiphon_command(own, port)

    async with contextlib.AsyncExitStack() as servers:
        running = []
        for number in range(setup.nodes):
            server = Server(f"{setup.name}-{number}", "/readyz", prepare)
            running.append(await servers.enter_async_context(start_server(server, folder / str(number))))
            # One worker answers before the others have started.
            await _wait_for_banner(folder / str(number) / "output.log")
        with contextlib.closing(Cluster(setup, running)) as cluster:
            yield cluster


def _make_folder(folder: Path) -> None:
    folder.mkdir()


async def _wait_for_banner(log: Path) -> None:
    while not _has_banner(log):  # noqa: ASYNC110 - the server is another process
        await asyncio.sleep(0.01)


def _has_banner(log: Path) -> bool:
    return b"Ctrl-C" in log.read_bytes()


@contextlib.contextmanager
def _make_databases() -> Iterator[tuple[str, str] | None]:
    """Yield the URLs of two schemas of a PostgreSQL server, or None if it is not installed.

    With one schema, the nodes of a setup would take the runs of the other. `ANTIPHON_TEST_PG` has the URL of an empty
    database. Otherwise the server of the tests is started, with its default settings.
    """
    sys.path.append(str(ROOT / "tests"))
    try:
        from support.postgres_server import EmptySchema, PostgresServer, is_installed
    finally:
        sys.path.pop()
    given = os.environ.get("ANTIPHON_TEST_PG")
    if not given and not is_installed():
        yield None
        return
    with contextlib.ExitStack() as stack:
        if not given:
            database = PostgresServer(options={})
            stack.callback(database.remove)
            given = database.url
        schemas = EmptySchema(given), EmptySchema(given)
        for schema in schemas:
            stack.callback(schema.remove)
        yield schemas[0].url, schemas[1].url
