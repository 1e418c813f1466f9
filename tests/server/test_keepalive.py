import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from antiphon.protocol.unions import Unknown
from antiphon.server.http import HttpRequest, Message
from antiphon.server.keepalive import Keepalive, encode_keepalive

GAP = 0.004
BEAT = encode_keepalive(7)
SILENT = {"default": [{"text": ["first"]}, {"wait": "gate"}, {"text": ["last"]}]}


class SlowWire:
    """A client that reads nothing until it is let to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.reading = asyncio.Event()
        self.asked = asyncio.Event()
        self.http_request = make_exchange(self.send)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.asked.set()
            await self.reading.wait()
            self.bodies.append(message["body"])


def make_exchange(send: Any) -> HttpRequest:
    async def receive() -> Message:
        raise AssertionError("nobody listens")

    return HttpRequest({"method": "GET", "path": "/", "query_string": b"", "headers": []}, receive, send)


async def see_looks(keepalive: Keepalive) -> list[bytes]:
    """What a silent stream sends until its second sign of life: every stream has been looked at often enough then."""
    bodies: list[bytes] = []
    two = asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
        if bodies.count(BEAT) == 2:
            two.set()

    http_request = make_exchange(send)
    with keepalive.watch(http_request, after=7):
        await http_request.write(b"hello")
        await two.wait()
    return bodies


def test_a_silent_stream_gives_signs_of_life_in_events_of_their_own(serve: Callable[..., Any]) -> None:
    running = serve(SILENT, keepalive_seconds=0.01)
    with running.client() as client:
        stream = client.responses.create(model="scripted", input="x", stream=True)
        told = []
        for event in stream:
            told.append((event.type, event.sequence_number))
            if event.type == "keepalive":
                running.do(lambda: running.backend.release("gate"))
    signs = [(before, number) for (_, before), (kind, number) in pairwise(told) if kind == "keepalive"]
    assert signs
    assert all(before == number for before, number in signs)
    assert [kind for kind, _ in told if kind != "keepalive"] == [
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


async def test_a_sign_of_life_is_an_event_with_data() -> None:
    sign = b'event: keepalive\ndata: {"type":"keepalive","sequence_number":7}\n\n'
    assert await see_looks(Keepalive(GAP)) == [b"hello", sign, sign]


async def test_it_repeats_the_number_of_the_last_event() -> None:
    slow = SlowWire()
    slow.reading.set()
    with Keepalive(GAP).watch(slow.http_request) as activity:
        await slow.http_request.write(b"hello")
        slow.asked.clear()
        activity.last_event = Unknown(b'{"type":"acme.tick","sequence_number":41}')
        await slow.asked.wait()
        await slow.http_request.finish(b"end")
    assert slow.bodies == [b"hello", encode_keepalive(41), b"end"]


async def test_a_stream_that_has_not_begun_gets_none(make_channel: Any) -> None:
    keepalive, channel = Keepalive(GAP), make_channel()
    with keepalive.watch(channel.make_request()):
        await see_looks(keepalive)
    assert channel.sent == []


async def test_a_stream_that_is_over_gets_none(make_channel: Any) -> None:
    keepalive, channel = Keepalive(GAP), make_channel()
    http_request = channel.make_request()
    with keepalive.watch(http_request, after=7):
        await http_request.write(b"hello")
    await see_looks(keepalive)
    assert [message.get("body") for message in channel.sent] == [None, b"hello"]


async def test_without_a_gap_there_are_none(make_channel: Any) -> None:
    channel = make_channel()
    http_request = channel.make_request()
    with Keepalive(0).watch(http_request, after=7):
        await http_request.write(b"hello")
        await see_looks(Keepalive(GAP))
    assert [message.get("body") for message in channel.sent] == [None, b"hello"]


async def test_a_client_that_does_not_read_gets_none_on_top() -> None:
    keepalive, slow = Keepalive(GAP), SlowWire()
    with keepalive.watch(slow.http_request, after=7):
        writing = asyncio.create_task(slow.http_request.write(b"hello"))
        await see_looks(keepalive)
        slow.reading.set()
        await writing
    assert slow.bodies == [b"hello"]


async def test_what_is_written_next_waits_for_the_sign_of_life_before_it() -> None:
    keepalive, slow = Keepalive(GAP), SlowWire()
    slow.reading.set()
    with keepalive.watch(slow.http_request, after=7):
        await slow.http_request.write(b"hello")
        slow.reading.clear()
        slow.asked.clear()
        await slow.asked.wait()
    ending = asyncio.create_task(slow.http_request.finish(b"end"))
    await see_looks(keepalive)
    assert slow.bodies == [b"hello"]
    slow.reading.set()
    await ending
    assert slow.bodies == [b"hello", BEAT, b"end"]
