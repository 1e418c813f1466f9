"""Hostile and normal traffic together: normal requests succeed, the server stays responsive, and no memory is lost."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.attacks import KEY, MODEL
from support.loop_blocks import MAX_BLOCK
from support.raw_server import Peer, serve_raw
from support.upstream_thread import ThreadedServer
from support.victim import TIMEOUT, Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

SECONDS = 12
# So many that three probes which the machine stops do not change the percentile.
PROBES = 400
MB = 2**20
HONEST = {"Authorization": "Bearer sk-ada"}
SCRIPT = {"rules": [{"user": "long", "answers": [[{"text": ["x" * 1000] * 2000}]]}], "default": "Hello."}


async def answer_endlessly(peer: Peer) -> None:
    """Send an answer that never ends."""
    while await peer.read_request():
        chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 10_000}}]})
        event = f"data: {chunk}\n\n".encode()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for _ in range(20_000):
            await peer.send(event)


@contextmanager
def attack(server: Victim) -> Iterator[None]:
    """Attack the server, from when every attack has been made once until the end of the block."""
    program = Path(__file__).parents[1] / "support" / "attacks.py"
    command = [sys.executable, str(program), str(server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "once\n"
            yield
            output, _ = process.communicate("", TIMEOUT)
            assert int(output) >= 2
        finally:
            process.kill()


def probe(server: Victim) -> float:
    """Return the seconds that `/healthz` takes, without those in which the server waits for a processor."""
    started, waited = time.perf_counter(), read_wait(server)
    assert server.ask("GET", "/healthz").status == 200
    return time.perf_counter() - started - (read_wait(server) - waited)


def read_wait(server: Victim) -> float:
    """Return the seconds for which the thread of the event loop was ready to run, but had no processor."""
    return int(Path(f"/proc/{server.pid}/task/{server.pid}/schedstat").read_text().split()[1]) / 1e9


def ask(server: Victim, model: str) -> str:
    body = {"model": model, "input": "Hi", "max_output_tokens": 16}
    response = server.ask("POST", "/v1/responses", body, headers=HONEST)
    return f"{response.status} {response.json.get('status')}"


def wait_for_memory(server: Victim, limit: float) -> float:
    """Wait until the memory is below a limit, and return it."""
    ended = time.monotonic() + TIMEOUT
    while server.rss_mb() > limit and time.monotonic() < ended:
        time.sleep(0.1)  # no event shows it
    return server.rss_mb()


@pytest.mark.slow
def test_server_serves_others_during_all_attacks(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    endless = upstream(serve_raw(answer_endlessly))
    server = victim(
        backends={
            "scripted": {"kind": "scripted", "script": "script.json"},
            "embedded": {"kind": "embedded", "context": 2048},
            "up": {"kind": "chat_completions", "base_url": endless.url, "models": ["endless"]},
        },
        script=SCRIPT,
        api_keys=[{"key": KEY, "project": "mallory"}, {"key": "sk-ada", "project": "ada"}],
        max_body_bytes=32 * MB,
        max_answer_bytes=4 * MB,
        queued_per_project=16,
        body_timeout_seconds=2,
    )
    # A server without attacks, whose times show how much the machine delays this process.
    quiet = victim(store="memory:")
    attacked: list[float] = []
    unattacked: list[float] = []
    outcomes: list[str] = []
    with attack(server):
        before = server.rss_mb()
        ended = time.monotonic() + SECONDS
        while time.monotonic() < ended or len(attacked) < PROBES:
            attacked.append(probe(server))
            unattacked.append(probe(quiet))
            if len(attacked) % 10 == 0:
                outcomes += [ask(server, "scripted"), ask(server, MODEL)]
    assert set(outcomes) <= {"200 completed", "200 incomplete"}
    assert percentile(attacked) < percentile(unattacked) + 0.1
    assert server.longest_block() < MAX_BLOCK
    assert wait_for_memory(server, 1.2 * before) <= 1.2 * before


def percentile(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]
