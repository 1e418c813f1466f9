"""Many requests that continue large histories at the same time: their memory is limited, and others are served."""

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import pytest

from support.live_server import HttpResponse
from support.loop_blocks import MAX_BLOCK
from support.raw_server import Peer, serve_raw
from support.upstream_thread import ThreadedServer
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

MB = 1024 * 1024
REQUESTS = 12
ANSWER = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}]})


class SlowUpstream:
    """Answers so many requests at once, and the others after `release`."""

    def __init__(self, answered: int) -> None:
        self._answered = answered
        self._released = asyncio.Event()
        self._requests = 0

    async def answer(self, peer: Peer) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(ANSWER)}\r\n\r\n"
        while True:
            await peer.read_request()
            self._requests += 1
            if self._requests > self._answered:
                await self._released.wait()
            await peer.send((head + ANSWER).encode())

    async def release(self) -> None:
        self._released.set()


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def find_outcome(response: HttpResponse) -> tuple[int, str | None]:
    return response.status, None if response.status == 200 else response.json["error"]["code"]


@pytest.mark.parametrize("kind", ["response", "conversation", "references"])
def test_concurrent_large_histories_use_limited_memory(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer], kind: str
) -> None:
    slow = SlowUpstream(0 if kind == "conversation" else 1)
    fake = upstream(serve_raw(slow.answer))
    server = victim(
        backends={
            "up": {"kind": "chat_completions", "base_url": fake.url, "models": ["m"]},
            "scripted": {"kind": "scripted", "script": "script.json"},
        },
        history_budget_bytes=80 * MB,
        history_wait_seconds=0.5,
    )
    body: dict[str, Any] = {"model": "m", "input": "More.", "store": False}
    items = [message(f"{number} {'x' * 4000}") for number in range(1500)]
    if kind == "conversation":
        long = [message("x" * 300_000)] * 20
        body["conversation"] = server.ask("POST", "/v1/conversations", {"items": long}).json["id"]
    else:
        stored = server.ask("POST", "/v1/responses", {"model": "m", "input": items}).json
        if kind == "response":
            body["previous_response_id"] = stored["id"]
        else:
            token = stored["id"].removeprefix("resp_")
            body["input"] = [{"type": "item_reference", "id": f"msg_{token}{number:04x}"} for number in range(1500)]
    server.reset_peak()
    before = server.rss_mb()
    with ThreadPoolExecutor(REQUESTS) as clients:
        pending = [clients.submit(server.ask, "POST", "/v1/responses", body) for _ in range(REQUESTS)]
        # The upstream answers nothing yet, so the first to end is one that was refused.
        (first, *_), _ = wait(pending, return_when=FIRST_COMPLETED)
        assert server.ask("POST", "/v1/responses", {"model": "scripted", "input": "Hi"}).status == 200
        fake.wait_for(lambda _: slow.release())
        outcomes = {find_outcome(each.result()) for each in pending}
    assert outcomes == {(200, None), (503, "server_overloaded")}
    assert first.result().headers["retry-after"] == "5"
    assert server.peak_mb() - before < 200
    assert server.longest_block() < MAX_BLOCK, server.log()
    # The memory is free again.
    assert find_outcome(server.ask("POST", "/v1/responses", body)) == (200, None)


def test_history_larger_than_the_budget_is_refused(victim: Callable[..., Victim]) -> None:
    server = victim(history_budget_bytes=4 * MB)
    items = [message("x" * 100_000)] * 20
    stored = server.ask("POST", "/v1/responses", {"model": "scripted", "input": items}).json["id"]
    conversation = server.ask("POST", "/v1/conversations", {"items": items}).json["id"]
    for field, value in {"previous_response_id": stored, "conversation": conversation}.items():
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            answer = server.ask("POST", path, {"model": "scripted", "input": "More.", field: value})
            assert find_outcome(answer) == (400, "history_too_large")
            assert answer.json["error"]["param"] == field
