"""Two workers on a PostgreSQL database."""

import json
import os
import signal
from pathlib import Path

from support.crashing_server import KillableServer, read_events, wait_until
from support.postgres_server import EmptySchema
from support.worker_processes import connect_to_each, frozen, is_running, list_workers

SCRIPT = {
    "rules": [{"user": "slow", "answers": [[{"text": "first "}, {"delay": 600}]]}],
    "default": "You said: {input}",
}
SLOW = {"model": "scripted", "input": "slow"}


def test_workers_share_responses_until_a_second_signal_ends_them(tmp_path: Path, postgres_url: str) -> None:
    options = {"workers": 2, "log_level": "info", "shutdown_grace_seconds": 600}
    server = KillableServer(tmp_path, SCRIPT, store=postgres_url, **options)
    workers = list_workers(server)
    one, two = connect_to_each(server)
    stream = one.request("POST", "/v1/responses", SLOW | {"stream": True})
    begun = json.loads(next(read_events(stream)))["response"]
    assert two.ask("GET", f"/v1/responses/{begun['id']}")["status"] == "in_progress"
    error = two.ask("GET", f"/v1/responses/{begun['id']}?stream=true")["error"]
    assert (error["param"], error["code"]) == ("stream", "invalid_value")
    cancelled = two.ask("POST", f"/v1/responses/{begun['id']}/cancel")
    assert json.loads([*read_events(stream)][-1])["response"] == cancelled
    queued = one.ask("POST", "/v1/responses", SLOW | {"background": True})
    assert two.ask("POST", f"/v1/responses/{queued['id']}/cancel")["status"] == "cancelled"
    assert one.ask("GET", f"/v1/responses/{queued['id']}")["status"] == "cancelled"

    stream = two.request("POST", "/v1/responses", SLOW | {"stream": True})
    next(read_events(stream))
    os.kill(server.pid, signal.SIGTERM)
    server.wait_for_log("foreground and 0 background responses have 600 s to end")
    assert all(map(is_running, workers))
    server.end(signal.SIGTERM, status=128 + signal.SIGTERM)
    wait_until(lambda: not any(map(is_running, workers)))
    one.close()
    two.close()


def test_background_response_of_killed_workers_is_taken_over_during_its_lease(
    tmp_path: Path, postgres_url: str, postgres_schema: EmptySchema
) -> None:
    options = {"workers": 2, "background_lease_seconds": 600, "shutdown_grace_seconds": 0}
    server = KillableServer(tmp_path, SCRIPT, store=postgres_url, **options)
    one, _ = connections = connect_to_each(server)

    def wait_for_attempt(number: int) -> None:
        wait_until(lambda: postgres_schema.fetch("SELECT attempt FROM runs WHERE owner > ''") == [(number,)])

    killed, other = list_workers(server)
    with frozen(other):
        one.ask("POST", "/v1/responses", SLOW | {"background": True})
        wait_for_attempt(1)
    os.kill(killed, signal.SIGKILL)
    wait_for_attempt(2)
    server.wait_for_log("worker 1 is ready again")
    for worker in list_workers(server):
        os.kill(worker, signal.SIGKILL)
    wait_for_attempt(3)
    for connection in connections:
        connection.close()
    server.wait_for_log("is ready again")
    server.wait_for_log("is ready again")
    server.stop()
