"""The harness of the hostile tests: it must see memory and blocks, or the other tests prove nothing."""

import sys
from collections.abc import Callable

import pytest

from support.upstream_server import json_of
from support.upstream_thread import ThreadedServer
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def test_victim_measures_memory_and_answers(victim: Callable[..., Victim]) -> None:
    server = victim(script={"default": "Hello."}, store="memory:")
    before = server.peak_mb()
    assert 10 < server.rss_mb() <= before
    assert server.ask("POST", "/v1/responses", {"model": "scripted", "input": "x" * 20_000_000}).status == 200
    assert server.peak_mb() > before + 20
    server.reset_peak()
    assert server.peak_mb() < before + 200
    assert server.longest_block() < 1
    with server.send_raw(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    server.kill()
    server.restart()
    assert server.ask("GET", "/healthz").status == 200


def test_victim_reaches_an_upstream(victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}]}
    fake = upstream(json_of(answer))
    options = {"kind": "chat_completions", "base_url": fake.url, "models": ["m"]}
    server = victim(backends={"up": options}, store="memory:")
    response = server.ask("POST", "/v1/responses", {"model": "m", "input": "Hello."})
    assert response.json["output"][0]["content"][0]["text"] == "Hi."
    assert fake.server.requests[-1].path == "/v1/chat/completions"
