"""Streams over an upstream that has answered before: their first events are made while it works on the request."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from antiphon.backends.chat_completions.backend import create
from antiphon.engine.policy import Policy
from antiphon.server.dialect import choose_dialect
from antiphon.server.http import HttpRequest
from antiphon.server.stream_start import StreamStart
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.sse import SseDecoder
from support.crashing_server import wait_until
from support.engine_harness import EngineHarness
from support.live_server import LiveServer, make_settings
from support.upstream_server import STALL, Reply, json_of, serve, stream_of
from support.upstream_thread import ThreadedServer

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"Hello."}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWER = stream_of(CHUNK, END)
BODY = {"model": "m", "input": "hi", "stream": True, "unheard_of": 1}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "description": "d", "strict": False}


@contextmanager
def bridge(*replies: Reply, **settings: Any) -> Iterator[LiveServer]:
    """Start a server over an upstream with these replies."""
    upstream = ThreadedServer(serve(replies))
    options = {"base_url": upstream.url, "models": ["m"], "request_retries": 0, "stream_retries": 0}
    running = LiveServer({}, make_settings(**settings), others={"up": create("up", options, Path())})
    try:
        yield running
    finally:
        running.stop()
        upstream.close()


def read_events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(message.data) for message in SseDecoder().feed(body) if message.data != b"[DONE]"]


@pytest.mark.parametrize("compat", ["openai", "open-responses"])
def test_stream_of_known_upstream_equals_its_first_stream(compat: str) -> None:
    with bridge(ANSWER, ANSWER, compat=compat) as running:
        answers = [running.ask("POST", "/v1/responses", BODY | {"tools": [TOOL]}) for _ in range(2)]
    first, second = [normalize(answer.body) for answer in answers]
    assert first == second
    assert [event["type"] for event in first][:2] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in first] == list(range(len(first)))
    names = {"x-antiphon-served-by", "x-antiphon-warnings", "content-type", "transfer-encoding", "x-request-id"}
    for answer in answers:
        assert names <= answer.headers.keys()
        assert answer.headers["x-antiphon-served-by"] == "up/m"
        assert answer.headers["x-antiphon-warnings"] == "ignored: unheard_of"


def normalize(body: bytes) -> list[dict[str, Any]]:
    """Return the events without ids and times."""
    removed = {"id", "item_id", "created_at", "completed_at"}

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: strip(each) for name, each in value.items() if name not in removed}
        return [strip(each) for each in value] if isinstance(value, list) else value

    return [strip(event) for event in read_events(body)]


def test_sdk_gets_the_status_of_a_refusal_and_no_header_of_the_run() -> None:
    refusal = json_of({"error": {"message": "Slow down.", "type": "rate_limit_error"}}, 429, Retry_After="70")
    with bridge(ANSWER, refusal) as running:
        assert running.ask("POST", "/v1/responses", BODY).status == 200
        with pytest.raises(openai.RateLimitError) as caught:
            running.client().responses.create(model="m", input="hi", stream=True)
    headers = caught.value.response.headers
    assert (headers["retry-after"], "x-antiphon-served-by" in headers) == ("70", False)


def test_client_that_disconnects_after_the_first_events_leaves_a_cancelled_response() -> None:
    body = json.dumps(BODY).encode()
    with bridge(ANSWER, stream_of(b": accepted\n\n", STALL)) as running:
        assert running.ask("POST", "/v1/responses", BODY).status == 200
        received = b""
        with running.connect() as client:
            client.sendall(
                b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            while b'"type":"response.in_progress"' not in received:
                received += (came := client.recv(65536))
                assert came, received
        response_id = received.partition(b'"id":"')[2].partition(b'"')[0].decode()
        wait_until(lambda: running.engine.foreground_count == 0)
        stored = running.ask("GET", f"/v1/responses/{response_id}").json
    assert (stored["status"], stored["output"]) == ("cancelled", [])


async def test_headers_of_a_run_are_sent_once_if_it_is_made_again() -> None:
    async def ignore(*_: Any) -> Any:
        raise AssertionError

    harness = EngineHarness({"default": "Hello."}, MemoryStore(), Policy())
    await harness.engine.start()
    # A server without the extension `BEGIN_BODY`.
    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "query_string": b"", "headers": []}
    http_request = HttpRequest(scope, ignore, ignore)
    pending, accepted = [await harness.ask(stream=True) for _ in range(2)]
    pending.warnings = accepted.warnings = ["history: repaired"]
    start = StreamStart(http_request, pending.request, choose_dialect({}, "openai"))
    send = start.prepare(pending)
    assert send is not None
    assert send() is False
    assert (http_request.extra_headers, http_request.warnings, http_request.response_id) == ([], [], None)
    start.accept(accepted)
    assert (http_request.extra_headers, http_request.warnings, http_request.response_id, start.chunk) == (
        [(b"x-antiphon-served-by", b"test/scripted")],
        ["history: repaired"],
        accepted.response.id,
        b"",
    )
    for run in (pending, accepted):
        await run.close()
    await harness.engine.close()
