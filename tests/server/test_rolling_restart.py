"""Processes are restarted one after the other under load: no acknowledged response is lost, and no request fails."""

import base64
import itertools
import os
import signal
from pathlib import Path
from typing import Any

from support.crashing_server import KillableServer, StreamReader
from support.request_load import RequestLoad
from support.worker_processes import list_workers

STEPS = [step for n in range(20) for step in ({"text": [f"w{n} "]}, {"delay": 0.05})]
SCRIPT = {"rules": [{"user": "steps", "answers": [STEPS]}], "default": "You said: {input}"}
BODY = {"model": "scripted", "input": "Hello"}


def test_workers_are_restarted_without_a_failed_request(tmp_path: Path) -> None:
    server = KillableServer(tmp_path, SCRIPT, workers=2)
    load = RequestLoad(lambda: server.address, clients=4, body=BODY)
    followed = server.start_background("steps")
    reader = StreamReader(server, followed)
    reader.wait_for(b'"w1 "')
    for number, worker in enumerate(list_workers(server), 1):
        os.kill(worker, signal.SIGTERM)
        server.wait_for_log(f"worker {number} ended with status 0; it is started again")
        server.wait_for_log(f"worker {number} is ready again")
    load.stop()
    assert (load.errors, load.refused) == ([], 0)
    assert {server.status(response_id) for response_id in load.ids[:: len(load.ids) // 20 or 1]} == {"completed"}
    events = server.read(followed)
    assert b"response.completed" in events[-1]
    server.stop()


def test_nodes_are_restarted_without_a_failed_request(tmp_path: Path, postgres_url: str) -> None:
    settings: dict[str, Any] = {"seal_keys": [base64.b64encode(bytes(32)).decode()], "data_dir": str(tmp_path)}
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    nodes = [KillableServer(folder, SCRIPT, store=postgres_url, **settings) for folder in folders[:2]]
    addresses = itertools.cycle([0, 1])
    load = RequestLoad(lambda: nodes[next(addresses)].address, clients=4, body=BODY)
    background = [nodes[0].start_background("steps") for _ in range(4)]
    StreamReader(nodes[0], background[0]).wait_for(b'"w1 "')
    nodes[0].stop()
    nodes[0] = KillableServer(folders[2], SCRIPT, store=postgres_url, **settings)
    nodes[1].stop()
    nodes[1] = nodes[0]
    load.stop()
    assert load.errors == []
    assert {nodes[0].status(response_id) for response_id in load.ids[:: len(load.ids) // 20 or 1]} == {"completed"}
    assert all(b"response.completed" in nodes[0].read(response_id)[-1] for response_id in background)
    nodes[0].stop()
