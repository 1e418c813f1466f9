"""Two workers on one SQLite file: each serves, cancels, follows and counts what the other has."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.crashing_server import KillableServer, read_events, wait_until
from support.prometheus import parse_metrics
from support.worker_processes import WorkerConnection, connect_to_each, frozen_between_writes, list_workers

WORDS = 12
SCRIPT = {
    "rules": [{"user": "slow", "answers": [[{"text": [f"word{n} " for n in range(WORDS)]}, {"delay": 60}]]}],
    "default": "You said: {input}",
}
STREAM = {"model": "scripted", "input": "slow", "stream": True}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers") / "store.db"


@pytest.fixture(scope="module")
def server(database: Path) -> Iterator[KillableServer]:
    settings = {"workers": 2, "metrics": True, "shutdown_grace_seconds": 0}
    running = KillableServer(database.parent, SCRIPT, store=f"sqlite:///{database}", **settings)
    yield running
    running.stop()


@pytest.fixture
def workers(server: KillableServer) -> Iterator[list[WorkerConnection]]:
    connections = connect_to_each(server)
    yield connections
    for connection in connections:
        connection.close()


def read_until(response: http.client.HTTPResponse, text: bytes) -> Any:
    return json.loads(next(event for event in read_events(response) if text in event))


def test_response_of_one_worker_is_continued_by_the_other(workers: list[WorkerConnection]) -> None:
    one, two = workers
    created = one.ask("POST", "/v1/responses", {"model": "scripted", "input": "Hello"})
    assert two.ask("GET", f"/v1/responses/{created['id']}") == created
    continued = {"model": "scripted", "input": "More", "previous_response_id": created["id"]}
    assert two.ask("POST", "/v1/responses", continued)["status"] == "completed"


def test_foreground_response_is_retrieved_and_cancelled_by_the_other_worker(workers: list[WorkerConnection]) -> None:
    one, two = workers
    stream = one.request("POST", "/v1/responses", STREAM)
    response_id = read_until(stream, b"response.created")["response"]["id"]
    read_until(stream, b"word%d" % (WORDS - 1))
    assert two.ask("GET", f"/v1/responses/{response_id}")["status"] == "in_progress"
    error = two.ask("GET", f"/v1/responses/{response_id}?stream=true")["error"]
    assert (error["param"], error["code"]) == ("stream", "invalid_value")
    cancelled = two.ask("POST", f"/v1/responses/{response_id}/cancel")
    assert (cancelled["id"], cancelled["status"]) == (response_id, "cancelled")
    assert read_until(stream, b"response.incomplete")["response"] == cancelled
    assert two.ask("GET", f"/v1/responses/{response_id}") == cancelled
    stream.read()


def test_response_of_a_frozen_worker_is_not_unknown(
    server: KillableServer, workers: list[WorkerConnection], database: Path
) -> None:
    one, two = workers
    stream = one.request("POST", "/v1/responses", STREAM)
    response_id = read_until(stream, b"response.created")["response"]["id"]
    with frozen_between_writes(list_workers(server)[0], database):
        answer = two.request("GET", f"/v1/responses/{response_id}")
        error = json.loads(answer.read())["error"]
        assert (answer.status, error["code"], error["param"]) == (503, "node_unresponsive", "response_id")
        assert 1 <= int(answer.headers["Retry-After"]) <= 13
        assert "antiphon_http_requests_total" in two.request("GET", "/metrics").read().decode()
    assert two.ask("POST", f"/v1/responses/{response_id}/cancel")["status"] == "cancelled"
    stream.read()


def test_unknown_response_is_not_found_by_any_worker(workers: list[WorkerConnection]) -> None:
    for worker in workers:
        for method, path in (("GET", "/v1/responses/resp_0"), ("POST", "/v1/responses/resp_0/cancel")):
            error = worker.ask(method, path)["error"]
            assert (error["message"], error["code"]) == ("Response with id 'resp_0' not found.", "not_found")


def test_background_response_is_followed_and_cancelled_by_the_other_worker(
    server: KillableServer, workers: list[WorkerConnection], database: Path
) -> None:
    one, two = workers
    body = {"model": "scripted", "input": "slow", "background": True}
    with frozen_between_writes(list_workers(server)[1], database):  # the first worker claims it
        response_id = one.ask("POST", "/v1/responses", body)["id"]
        wait_until(lambda: one.ask("GET", f"/v1/responses/{response_id}")["status"] == "in_progress")
    stream = two.request("GET", f"/v1/responses/{response_id}?stream=true")
    cancelling = threading.Timer(0, lambda: one.ask("POST", f"/v1/responses/{response_id}/cancel"))
    read_until(stream, b"word%d" % (WORDS - 1))
    cancelling.start()
    assert read_until(stream, b"response.incomplete")["response"]["status"] == "cancelled"
    cancelling.join()
    stream.read()
    with frozen_between_writes(list_workers(server)[1], database):
        response_id = one.ask("POST", "/v1/responses", body)["id"]
        wait_until(lambda: one.ask("GET", f"/v1/responses/{response_id}")["status"] == "in_progress")
    assert two.ask("POST", f"/v1/responses/{response_id}/cancel")["status"] == "cancelled"
    assert one.ask("GET", f"/v1/responses/{response_id}")["status"] == "cancelled"


def test_metrics_of_one_worker_show_all(workers: list[WorkerConnection]) -> None:
    for worker in workers:
        worker.ask("GET", "/v1/responses/resp_0")
    families = parse_metrics(workers[0].request("GET", "/metrics").read().decode())
    labels = {"route": "/v1/responses/{response_id}", "method": "GET", "status": "4xx"}
    requests = families["antiphon_http_requests_total"]
    assert all(requests.get(**labels, worker=number) >= 1 for number in ("1", "2"))
    assert [labels for _, labels, _ in families["process_open_fds"].samples] == [{"worker": "1"}, {"worker": "2"}]
    assert [labels for _, labels, _ in families["antiphon_background_waiting"].samples] == [{}]
