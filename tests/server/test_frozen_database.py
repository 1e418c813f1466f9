"""A server whose database accepts connections but does not answer."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.crashing_server import KillableServer, StreamReader
from support.postgres_server import PostgresServer, is_installed
from support.worker_processes import frozen, list_workers

SCRIPT = {"rules": [{"user": "slow", "answers": [[{"text": "first "}, {"delay": 600}]]}], "default": "Yes."}

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs make extras")


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    database = PostgresServer()
    yield database
    database.remove()


@contextlib.contextmanager
def frozen_database(database: PostgresServer) -> Iterator[None]:
    with frozen(database.pid, *list_workers(database)):
        yield


@pytest.mark.slow  # each waits for all bounds
@pytest.mark.parametrize("workers", [1, 2])
def test_server_ends_although_its_database_does_not_answer(
    database: PostgresServer, tmp_path: Path, workers: int
) -> None:
    options = {"workers": workers, "log_level": "info", "shutdown_grace_seconds": 0}
    server = KillableServer(tmp_path, SCRIPT, store=database.url, **options)
    reader = StreamReader(server, server.start_background("slow"))
    reader.wait_for(b"first")
    with frozen_database(database):
        log = server.end(signal.SIGTERM, status=1)
    assert log.count("stopping: not closed within 15 seconds: ") == workers
    assert log.count("backends, usage, containers, store\n") == workers
    assert ("Not all workers stopped: worker " in log) is (workers > 1)
