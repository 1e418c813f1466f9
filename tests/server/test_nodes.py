"""Several server processes on one PostgreSQL database: any of them serves any request."""

import base64
import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.crashing_server import KillableServer, StreamReader, wait_until
from support.postgres_server import EmptySchema, PostgresServer, is_installed

WORDS = 12
SCRIPT = {
    "rules": [
        {"user": "slow", "answers": [[{"text": [f"word{n} " for n in range(WORDS)]}, {"delay": 60}]]},
        {
            "user": "steps",
            "answers": [[step for n in range(WORDS) for step in ({"text": [f"w{n} "]}, {"delay": 0.02})]],
        },
    ],
    "default": "You said: {input}",
}
LEASE = 1.0
# No lease of this length expires in a test.
LONG_LEASE = 3600.0

StartNode = Callable[..., KillableServer]


@pytest.fixture
def start_node(tmp_path: Path, postgres_url: str) -> Iterator[StartNode]:
    nodes: list[KillableServer] = []

    def start(**settings: Any) -> KillableServer:
        folder = tmp_path / f"node{len(nodes)}"
        folder.mkdir()
        shared = {"background_lease_seconds": LEASE, "seal_keys": [base64.b64encode(bytes(32)).decode()]}
        node = KillableServer(folder, SCRIPT, store=postgres_url, **(shared | settings))
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        with contextlib.suppress(ValueError):  # killed by the test
            node.kill()


def number_events(events: list[bytes]) -> list[int]:
    return [json.loads(event)["sequence_number"] for event in events]


def test_response_of_one_node_is_served_by_another(start_node: StartNode) -> None:
    one, two = start_node(), start_node()
    created = one.ask("POST", "/v1/responses", {"model": "scripted", "input": "Hello"})
    assert two.ask("GET", f"/v1/responses/{created['id']}") == created
    continued = {"model": "scripted", "input": "More", "previous_response_id": created["id"]}
    assert two.ask("POST", "/v1/responses", continued)["status"] == "completed"

    running = one.start_background("slow")
    reader = StreamReader(two, running)
    reader.wait_for(b"word%d" % (WORDS - 1))
    cancelled = two.ask("POST", f"/v1/responses/{running}/cancel")
    reader.join()
    assert cancelled["status"] == "cancelled"
    assert json.loads(reader.events[-1])["response"]["status"] == "cancelled"
    assert one.read(running) == two.read(running) == reader.events
    assert two.ask("DELETE", f"/v1/responses/{running}")["deleted"] is True
    assert one.ask("GET", f"/v1/responses/{running}")["error"]["code"] == "not_found"


def test_reader_resumes_on_another_node(start_node: StartNode) -> None:
    one, two = start_node(), start_node()
    response_id = one.start_background("steps")
    first = StreamReader(one, response_id)
    first.wait_for(b'"w3 "')
    received = list(first.events)
    second = StreamReader(two, response_id, after=len(received) - 1)
    second.join()
    first.join()
    assert [*received, *second.events] == first.events
    assert number_events(first.events) == list(range(len(first.events)))


@pytest.mark.slow
def test_two_of_three_nodes_are_killed_with_200_responses(start_node: StartNode) -> None:
    nodes = [start_node(background_slots=16, background_lease_seconds=LONG_LEASE) for _ in range(3)]
    with ThreadPoolExecutor(8) as clients:
        ids = list(clients.map(lambda n: nodes[n % 3].start_background("steps"), range(200)))
        readers = [StreamReader(nodes[2], response_id) for response_id in ids[:20]]
        for victim in nodes[:2]:
            wait_until(lambda: sum(node_status == "completed" for node_status in map(nodes[2].status, ids[:40])) > 3)
            victim.kill()
        for reader in readers:
            reader.join()
        logs = list(clients.map(nodes[2].read, ids))
    assert all(b"response.completed" in log[-1] for log in logs)
    assert [reader.events for reader in readers] == logs[:20]
    assert [number_events(log) for log in logs] == [list(range(len(logs[0])))] * 200


def test_killed_node_is_replaced_before_its_leases_expire(start_node: StartNode, postgres_schema: EmptySchema) -> None:
    one = start_node(background_lease_seconds=LONG_LEASE)
    response_id = one.start_background("slow")
    reader = StreamReader(one, response_id)
    reader.wait_for(b"word%d" % (WORDS - 1))
    wait_until(lambda: postgres_schema.fetch("SELECT attempt, locked_owner = owner FROM runs") == [(1, True)])
    one.kill()
    reader.join()
    two = start_node(background_lease_seconds=LONG_LEASE)
    wait_until(lambda: postgres_schema.fetch("SELECT attempt, locked_owner = owner FROM runs") == [(2, True)])
    assert two.ask("POST", f"/v1/responses/{response_id}/cancel")["status"] == "cancelled"
    events = two.read(response_id)
    assert events[: len(reader.events)] == reader.events
    assert number_events(events) == list(range(len(events)))


def test_frozen_node_writes_nothing_after_its_run_was_taken_over(
    start_node: StartNode, postgres_schema: EmptySchema
) -> None:
    one = start_node()
    response_id = one.start_background("steps")
    query = f"SELECT * FROM events WHERE response_id = '{response_id}' ORDER BY last"
    StreamReader(one, response_id).wait_for(b'"w1 "')
    one.freeze()
    two = start_node()
    try:
        wait_until(lambda: two.status(response_id) == "completed")
        events = two.read(response_id)
        stored = two.ask("GET", f"/v1/responses/{response_id}")
        rows = postgres_schema.fetch(query)
    finally:
        one.thaw()
    assert b"response.completed" in one.read(one.start_background("Are you awake?"))[-1]
    assert one.read(response_id) == two.read(response_id) == events
    assert one.ask("GET", f"/v1/responses/{response_id}") == stored
    assert postgres_schema.fetch(query) == rows
    assert number_events(events) == list(range(len(events)))


def test_frozen_node_is_no_interruption_when_it_returns(start_node: StartNode, postgres_schema: EmptySchema) -> None:
    one = start_node()
    response_id = one.start_background("slow")
    StreamReader(one, response_id).wait_for(b"word%d" % (WORDS - 1))
    one.freeze()
    try:
        two = start_node(background_lease_seconds=LONG_LEASE)
        wait_until(lambda: postgres_schema.fetch("SELECT attempt, interruptions FROM runs") == [(2, 1)])
    finally:
        one.thaw()
    wait_until(lambda: postgres_schema.fetch("SELECT attempt, interruptions FROM runs") == [(2, 0)])
    assert "1 background responses were taken over by other processes" in one.wait_for_log("taken over by")
    assert two.ask("POST", f"/v1/responses/{response_id}/cancel")["status"] == "cancelled"


@pytest.mark.skipif(not is_installed(), reason="needs make extras")
def test_server_answers_503_while_postgresql_is_restarted(tmp_path: Path) -> None:
    request = {"model": "scripted", "input": "Hello"}
    with contextlib.ExitStack() as stack:
        database = PostgresServer()
        stack.callback(database.remove)
        node = KillableServer(tmp_path, SCRIPT, store=database.url, background_lease_seconds=LEASE)
        stack.callback(node.kill)
        created = node.ask("POST", "/v1/responses", request)
        running = node.start_background("steps")
        database.stop(is_crash=True)
        for method, path, body in (
            ("POST", "/v1/responses", request),
            ("POST", "/v1/responses", request | {"background": True}),
            ("GET", f"/v1/responses/{created['id']}", None),
            ("GET", "/readyz", None),
        ):
            status, retry_after, answer = send(node, method, path, body)
            assert (status, retry_after) == (503, "1"), (path, answer)
            assert database.url not in answer
        database.start()
        wait_until(lambda: send(node, "GET", "/readyz", None)[0] == 200)
        assert node.ask("GET", f"/v1/responses/{created['id']}") == created
        assert node.ask("POST", "/v1/responses", request)["status"] == "completed"
        events = node.read(running)
        assert b"response.completed" in events[-1]
        assert number_events(events) == list(range(len(events)))


def send(node: KillableServer, method: str, path: str, body: Any) -> tuple[int, str | None, str]:
    with contextlib.closing(http.client.HTTPConnection(node.address, timeout=60)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.getheader("Retry-After"), response.read().decode()
