"""Reloads under load: many at once, of broken files, and without the model or the key that is in use."""

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from support.crashing_server import wait_until
from support.loop_blocks import MAX_BLOCK
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

KEYS = [{"key": "sk-good-key", "project": "a"}, {"key": "sk-removed-key", "project": "b"}]
SCRIPT = {
    "rules": [{"user": "slow", "answers": [[{"text": ["x "]}, {"delay": 0.05}] * 20]}],
    "default": "Hello.",
}
REQUEST = {"model": "scripted", "input": "hi"}

BODY = json.dumps(REQUEST | {"input": "slow", "stream": True}).encode()
STREAM = (
    b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-removed-key\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


def count_files(server: Victim) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def replace(path: Path, text: str) -> None:
    """Replace a file at once: the server must not read a part of it."""
    other = path.with_suffix(".new")
    other.write_text(text)
    other.replace(path)


def ask(server: Victim, key: str) -> int:
    return server.ask("POST", "/v1/responses", REQUEST, headers={"Authorization": f"Bearer {key}"}).status


def test_hundred_reloads_under_load_drop_no_request(victim: Callable[..., Victim]) -> None:
    server = victim(script=SCRIPT, api_keys=KEYS)
    settings = server.folder / "antiphon.toml"
    good = settings.read_text()
    other = good.replace("backends.scripted", "backends.other")
    texts = [good, f"{good}\n]broken[", other, good.replace("sk-removed-key", "sk-another-key")]
    assert ask(server, "sk-good-key") == 200
    before, files = server.rss_mb(), count_files(server)
    server.reset_peak()
    stopped = Event()

    def load() -> set[int]:
        statuses = set()
        while not stopped.is_set():
            statuses.add(ask(server, "sk-good-key"))
        return statuses

    with ThreadPoolExecutor(2) as pool, server.send_raw(STREAM) as stream:
        received = stream.recv(100)
        loads = [pool.submit(load) for _ in range(2)]
        for number in range(100):
            replace(settings, texts[number % len(texts)])
            os.kill(server.pid, signal.SIGHUP)
            ask(server, "sk-good-key")
        stopped.set()
        # The backend has another name in one file, but the same model.
        assert {status for statuses in loads for status in statuses.result()} == {200}
        while part := stream.recv(65536):
            received += part
        assert b'"type":"response.completed"' in received, "a response that is running is completed"
    replace(settings, texts[-1])
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: ask(server, "sk-removed-key") == 401)
    assert (ask(server, "sk-good-key"), ask(server, "sk-another-key")) == (200, 200)
    assert "the settings were not reloaded, the old ones stay in effect" in server.log()
    assert server.peak_mb() < before + 30
    assert count_files(server) <= files + 5
    assert server.longest_block() < MAX_BLOCK
