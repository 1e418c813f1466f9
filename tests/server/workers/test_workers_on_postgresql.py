"""Two workers on a PostgreSQL database."""

import json
import os
import signal
from pathlib import Path

from support.crashing_server import KillableServer, read_events, wait_until
from support.worker_processes import connect_to_each, is_running, list_workers

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
