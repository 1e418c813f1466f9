import asyncio
import http.client
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from antiphon.protocol.unions import Unknown
from antiphon.server.http import HttpRequest, Message
from antiphon.server.keepalive import Keepalive, encode_keepalive
from support.live_server import TIMEOUT

INTERVAL = 0.004
KEEPALIVE = encode_keepalive(7)
IDLE = {"default": [{"text": ["first"]}, {"wait": "gate"}, {"text": ["last"]}]}


class SlowClient:
    """A client that reads only while `reading` is set."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.reading = asyncio.Event()
        self.send_called = asyncio.Event()
        self.http_request = make_http_request(self.send)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.send_called.set()
            await self.reading.wait()
            self.bodies.append(message["body"])


def make_http_request(send: Any) -> HttpRequest:
    async def receive() -> Message:
        raise AssertionError("nothing is received")

    return HttpRequest({"method": "GET", "path": "/", "query_string": b"", "headers": []}, receive, send)


async def run_idle_stream(keepalive: Keepalive) -> list[bytes]:
    """Return the chunks of an idle stream up to its second keepalive. All streams have been checked by then."""
    bodies: list[bytes] = []
    second = asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
        if bodies.count(KEEPALIVE) == 2:
            second.set()

    http_request = make_http_request(send)
    with keepalive.watch(http_request, encode_keepalive, after=7):
        await http_request.write(b"hello")
        await second.wait()
    return bodies


def test_idle_stream_gets_keepalive_events(serve: Callable[..., Any]) -> None:
    running = serve(IDLE, keepalive_seconds=0.01)
    with running.client() as client:
        stream = client.responses.create(model="scripted", input="x", stream=True)
        received = []
        for event in stream:
            received.append((event.type, event.sequence_number))
            if event.type == "keepalive":
                running.do(lambda: running.backend.release("gate"))
    keepalives = [(before, number) for (_, before), (kind, number) in pairwise(received) if kind == "keepalive"]
    assert keepalives
    assert all(before == number for before, number in keepalives)
    assert [kind for kind, _ in received if kind != "keepalive"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_keepalive_is_an_event_with_data() -> None:
    keepalive = b'event: keepalive\ndata: {"type":"keepalive","sequence_number":7}\n\n'
    assert await run_idle_stream(Keepalive(INTERVAL)) == [b"hello", keepalive, keepalive]


def read_idle_stream(running: Any, **headers: str) -> bytes:
    """Return the body of a stream that is idle until it has sent something after its first text."""
    body = json.dumps({"model": "scripted", "input": "x", "stream": True}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", "/v1/responses", body, sent)
    response = connection.getresponse()
    received = b""
    while b"first" not in received or b"keepalive" not in received:
        received += response.read1()
    running.do(lambda: running.backend.release("gate"))
    received += response.read()
    connection.close()
    return received


def test_idle_open_responses_stream_gets_comments(serve: Callable[..., Any]) -> None:
    running = serve(IDLE, keepalive_seconds=0.01)
    received = read_idle_stream(running, x_antiphon_compat="open-responses")
    assert b"\n\n: keepalive\n\n" in received
    parts = [part for part in received.decode().split("\n\n")[:-1] if part != ": keepalive"]
    assert all(part.startswith("event: response.") for part in parts[:-1])
    assert parts[-1] == "data: [DONE]"


def test_configured_dialect_selects_the_keepalive(serve: Callable[..., Any]) -> None:
    running = serve(IDLE, keepalive_seconds=0.01, compat="open-responses")
    assert b"event: keepalive" not in read_idle_stream(running)
    assert b"event: keepalive" in read_idle_stream(running, x_antiphon_compat="openai")


def test_idle_followed_stream_uses_its_own_dialect(serve: Callable[..., Any]) -> None:
    running = serve(IDLE, keepalive_seconds=0.01)
    body = {"model": "scripted", "input": "x", "background": True}
    response_id = running.ask("POST", "/v1/responses", body).json["id"]
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    headers = {"x-antiphon-compat": "open-responses"}
    connection.request("GET", f"/v1/responses/{response_id}?stream=true", headers=headers)
    response = connection.getresponse()
    received = b""
    while b"\n: keepalive\n" not in received:
        received += response.read1()
    running.do(lambda: running.backend.release("gate"))
    received += response.read()
    connection.close()
    assert b"event: keepalive" not in received
    assert received.endswith(b"data: [DONE]\n\n")


async def test_keepalive_repeats_the_last_sequence_number() -> None:
    slow = SlowClient()
    slow.reading.set()
    with Keepalive(INTERVAL).watch(slow.http_request, encode_keepalive) as activity:
        await slow.http_request.write(b"hello")
        slow.send_called.clear()
        activity.last_event = Unknown(b'{"type":"acme.tick","sequence_number":41}')
        await slow.send_called.wait()
        await slow.http_request.finish(b"end")
    assert slow.bodies == [b"hello", encode_keepalive(41), b"end"]


async def test_stream_that_has_not_started_gets_no_keepalive(make_channel: Any) -> None:
    keepalive, channel = Keepalive(INTERVAL), make_channel()
    with keepalive.watch(channel.make_request(), encode_keepalive):
        await run_idle_stream(keepalive)
    assert channel.sent == []


async def test_finished_stream_gets_no_keepalive(make_channel: Any) -> None:
    keepalive, channel = Keepalive(INTERVAL), make_channel()
    http_request = channel.make_request()
    with keepalive.watch(http_request, encode_keepalive, after=7):
        await http_request.write(b"hello")
    await run_idle_stream(keepalive)
    assert [message.get("body") for message in channel.sent] == [None, b"hello"]


async def test_interval_zero_disables_keepalive(make_channel: Any) -> None:
    channel = make_channel()
    http_request = channel.make_request()
    with Keepalive(0).watch(http_request, encode_keepalive, after=7):
        await http_request.write(b"hello")
        await run_idle_stream(Keepalive(INTERVAL))
    assert [message.get("body") for message in channel.sent] == [None, b"hello"]


async def test_client_that_does_not_read_gets_no_keepalive() -> None:
    keepalive, slow = Keepalive(INTERVAL), SlowClient()
    with keepalive.watch(slow.http_request, encode_keepalive, after=7):
        writing = asyncio.create_task(slow.http_request.write(b"hello"))
        await run_idle_stream(keepalive)
        slow.reading.set()
        await writing
    assert slow.bodies == [b"hello"]


async def test_next_write_waits_for_the_keepalive() -> None:
    keepalive, slow = Keepalive(INTERVAL), SlowClient()
    slow.reading.set()
    with keepalive.watch(slow.http_request, encode_keepalive, after=7):
        await slow.http_request.write(b"hello")
        slow.reading.clear()
        slow.send_called.clear()
        await slow.send_called.wait()
    ending = asyncio.create_task(slow.http_request.finish(b"end"))
    await run_idle_stream(keepalive)
    assert slow.bodies == [b"hello"]
    slow.reading.set()
    await ending
    assert slow.bodies == [b"hello", KEEPALIVE, b"end"]
