"""The processes of a server with workers, and connections to a chosen one of them."""

import contextlib
import http.client
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from support.crashing_server import TIMEOUT, KillableServer, wait_until


class RunningProcess(Protocol):
    @property
    def pid(self) -> int: ...


def list_workers(server: RunningProcess) -> list[int]:
    """Return the process ids of the workers, in the order of their start."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
    return sorted(int(pid) for pid in children.split())


def is_running(pid: int) -> bool:
    """Return False if the process has ended, even if its parent has not noticed it."""
    return read_state(pid) not in {"", "Z"}


def read_state(pid: int) -> str:
    """Return the letter of the state of a process, or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class WorkerConnection:
    """A connection that one worker has accepted. It stays open between requests."""

    def __init__(self, server: KillableServer) -> None:
        self._connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT)
        assert self.ask("GET", "/healthz") == {"status": "ok"}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self.request(method, path, body).read())

    def request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        self._connection.request(method, path, None if body is None else json.dumps(body))
        return self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Stop these processes for a while. They accept no connections."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: all(read_state(pid) in {"T", "Z", ""} for pid in pids))  # a system call ends before
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def frozen_between_writes(pid: int, database: Path) -> Iterator[None]:
    """Stop a process for a while, but not while it writes to a SQLite file: the others could not write to it."""
    while True:
        with frozen(pid):
            if is_writable(database):
                yield
                return


def is_writable(database: Path) -> bool:
    """Return False if a process holds the lock of a SQLite file."""
    with contextlib.closing(sqlite3.connect(database, timeout=0.1, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True


def connect_to_each(server: KillableServer) -> list[WorkerConnection]:
    """Return a connection to each worker."""
    workers = list_workers(server)
    connections = []
    for worker in workers:
        with frozen(*(other for other in workers if other != worker)):
            connections.append(WorkerConnection(server))
    return connections
