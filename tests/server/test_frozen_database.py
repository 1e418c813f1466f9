"""A server whose database accepts connections but does not answer."""

import contextlib
import http.client
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.server.auth import CHECK_SECONDS
from support.crashing_server import KillableServer, StreamReader
from support.live_server import TIMEOUT
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


def test_server_without_keys_is_live_although_its_database_does_not_answer(
    database: PostgresServer, tmp_path: Path
) -> None:
    server = KillableServer(tmp_path, SCRIPT, store=database.url)
    with frozen_database(database):
        deadline = time.monotonic() + 2 * CHECK_SECONDS
        slowest = 0.0
        while time.monotonic() < deadline:
            began_at = time.monotonic()
            assert server.ask("GET", "/healthz") == {"status": "ok"}
            slowest = max(slowest, time.monotonic() - began_at)
    server.kill()
    assert slowest < CHECK_SECONDS


@pytest.mark.slow  # each waits for all bounds
@pytest.mark.parametrize("workers", [1, 2])
def test_server_ends_although_its_database_does_not_answer(
    database: PostgresServer, tmp_path: Path, workers: int
) -> None:
    options = {"workers": workers, "log_level": "info", "shutdown_grace_seconds": 0}
    server = KillableServer(tmp_path, SCRIPT, store=database.url, **options)
    response_id = server.start_background("slow")
    reader = StreamReader(server, response_id)
    reader.wait_for(b"first")
    with contextlib.closing(http.client.HTTPConnection(server.address, timeout=TIMEOUT)) as waiting:
        waiting.connect()
        with frozen_database(database):
            waiting.request("GET", f"/v1/responses/{response_id}")
            assert server.ask("GET", "/healthz") == {"status": "ok"}
            log = server.end(signal.SIGTERM, status=1)
        answer = waiting.getresponse()
        error = json.loads(answer.read())["error"]
    assert (answer.status, error["message"]) == (503, "The server is shutting down.")
    assert log.count("stopping: not closed within 15 seconds: ") == workers
    assert log.count("backends, usage, containers, store\n") == workers
    assert ("Not all workers stopped: worker " in log) is (workers > 1)
