import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from antiphon.protocol.unions import Unknown
from antiphon.server.http import HttpRequest, Message
from antiphon.server.keepalive import Keepalive, encode_keepalive

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
    with keepalive.watch(http_request, after=7):
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


async def test_keepalive_repeats_the_last_sequence_number() -> None:
    slow = SlowClient()
    slow.reading.set()
    with Keepalive(INTERVAL).watch(slow.http_request) as activity:
        await slow.http_request.write(b"hello")
        slow.send_called.clear()
        activity.last_event = Unknown(b'{"type":"acme.tick","sequence_number":41}')
        await slow.send_called.wait()
        await slow.http_request.finish(b"end")
    assert slow.bodies == [b"hello", encode_keepalive(41), b"end"]


async def test_stream_that_has_not_started_gets_no_keepalive(make_channel: Any) -> None:
    keepalive, channel = Keepalive(INTERVAL), make_channel()
    with keepalive.watch(channel.make_request()):
        await run_idle_stream(keepalive)
    assert channel.sent == []


async def test_finished_stream_gets_no_keepalive(make_channel: Any) -> None:
    keepalive, channel = Keepalive(INTERVAL), make_channel()
    http_request = channel.make_request()
    with keepalive.watch(http_request, after=7):
        await http_request.write(b"hello")
    await run_idle_stream(keepalive)
    assert [message.get("body") for message in channel.sent] == [None, b"hello"]


async def test_interval_zero_disables_keepalive(make_channel: Any) -> None:
    channel = make_channel()
    http_request = channel.make_request()
    with Keepalive(0).watch(http_request, after=7):
        await http_request.write(b"hello")
        await run_idle_stream(Keepalive(INTERVAL))
    assert [message.get("body") for message in channel.sent] == [None, b"hello"]


async def test_client_that_does_not_read_gets_no_keepalive() -> None:
    keepalive, slow = Keepalive(INTERVAL), SlowClient()
    with keepalive.watch(slow.http_request, after=7):
        writing = asyncio.create_task(slow.http_request.write(b"hello"))
        await run_idle_stream(keepalive)
        slow.reading.set()
        await writing
    assert slow.bodies == [b"hello"]


async def test_next_write_waits_for_the_keepalive() -> None:
    keepalive, slow = Keepalive(INTERVAL), SlowClient()
    slow.reading.set()
    with keepalive.watch(slow.http_request, after=7):
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
