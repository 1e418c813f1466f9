"""A project that sends too much: the queue is bounded, others are served in turn, and long prompts are no obstacle."""

import asyncio
import json
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from antiphon.backends.base import Turn
from antiphon.backends.embedded.backend import EmbeddedBackend
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol import codec
from antiphon.protocol.items import Message
from antiphon.stream.deltas import Deltas, Finish
from support.loop_blocks import MAX_BLOCK
from support.upstream_server import STALL, stream_of
from support.upstream_thread import ThreadedServer
from support.victim import Victim
from support.websocket_client import WebSocketClient

StartVictim = Callable[..., Victim]

# "hold" begins and does not end before its client disconnects.
HOLD = {"slots": 1, "rules": [{"user": "hold", "answers": [[{"text": "begun"}, {"delay": 3600}]]}], "default": "done"}
KEYS = [{"key": project, "project": project} for project in "abc"]
# A stream begins at once, so its first event shows that the request waits.
AT_ONCE = {"opening_seconds": 0, "store": "memory:"}


def send(server: Victim, project: str, text: str = "hi", **fields: Any) -> socket.socket:
    """Send a streamed request, and return the connection."""
    body = json.dumps({"model": "scripted", "input": text, "stream": True} | fields).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {project}\r\n"
    connection = server.connect()
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def read_until(connection: socket.socket, *texts: bytes) -> bytes:
    """Read up to one of the texts."""
    received = b""
    while not any(text in received for text in texts):
        data = connection.recv(65536)
        assert data, received
        received += data
    return received


def read_head(connection: socket.socket) -> tuple[int, bytes]:
    """Read the beginning of a response: the first event, or the whole error. Return the status and the text."""
    text = read_until(connection, b"response.created", b'"code"')
    return int(text.split()[1]), text


@pytest.fixture
def busy(victim: StartVictim) -> Iterator[tuple[Victim, ExitStack]]:
    """A server whose only slot is taken by project a, which has as many waiting requests as it may have: two of 3."""
    server = victim(script=HOLD, api_keys=KEYS, queued=3, queued_per_project=2, **AT_ONCE)
    with ExitStack() as connections:
        read_until(connections.enter_context(send(server, "a", "hold")), b"begun")
        for _ in range(2):
            assert read_head(connections.enter_context(send(server, "a")))[0] == 200
        yield server, connections


def test_full_queue_refuses_at_once_on_every_transport(busy: tuple[Victim, ExitStack]) -> None:
    server, connections = busy
    body = {"model": "scripted", "input": "hi"}
    whole = server.ask("POST", "/v1/responses", body, headers={"Authorization": "Bearer a"})
    assert (whole.status, whole.json["error"]["type"], whole.json["error"]["code"]) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert "`queued_per_project`" in whole.json["error"]["message"]
    assert int(whole.headers["retry-after"]) >= 1
    status, text = read_head(connections.enter_context(send(server, "a")))
    assert (status, b"retry-after: " in text) == (429, True)
    with WebSocketClient(server, key="a") as client:  # type: ignore[arg-type]
        refused = client.refuse()
        assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")

    waiting = connections.enter_context(send(server, "b"))
    assert read_head(waiting)[0] == 200
    whole = server.ask("POST", "/v1/responses", body, headers={"Authorization": "Bearer c"})
    assert (whole.status, whole.json["error"]["type"], whole.json["error"]["code"]) == (
        503,
        "server_error",
        "server_overloaded",
    )
    assert "`queued`" in whole.json["error"]["message"]
    assert int(whole.headers["retry-after"]) >= 1


def test_disconnected_client_leaves_the_queue_and_frees_its_slot(busy: tuple[Victim, ExitStack]) -> None:
    server, connections = busy
    connections.close()  # the running request and the waiting ones
    answer = server.ask(
        "POST", "/v1/responses", {"model": "scripted", "input": "hi"}, headers={"Authorization": "Bearer a"}
    )
    assert answer.status == 200


def test_wait_beyond_queue_seconds_ends_with_503(victim: StartVictim) -> None:
    server = victim(script=HOLD, api_keys=KEYS, queue_seconds=0.05, **AT_ONCE)
    with send(server, "a", "hold") as running:
        read_until(running, b"begun")
        body = {"model": "scripted", "input": "hi"}
        whole = server.ask("POST", "/v1/responses", body, headers={"Authorization": "Bearer b"})
        assert (whole.status, whole.json["error"]["code"]) == (503, "server_overloaded")
        assert "`queue_seconds`" in whole.json["error"]["message"]
        assert int(whole.headers["retry-after"]) >= 1
        with send(server, "b") as late:
            text = read_until(late, b"response.failed")
        assert b"server_overloaded" in text
        with WebSocketClient(server, key="b") as client:  # type: ignore[arg-type]
            client.create()
            events = client.finish()
        assert "server_overloaded" in json.dumps(events[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_flood_is_refused_within_bounds_and_another_project_is_served_next(victim: StartVictim) -> None:
    server = victim(script=HOLD, api_keys=KEYS, queued_per_project=20, **AT_ONCE)
    with ExitStack() as connections:
        running = connections.enter_context(send(server, "a", "hold"))
        read_until(running, b"begun")
        flood = [connections.enter_context(send(server, "a")) for _ in range(300)]
        statuses = Counter(read_head(connection)[0] for connection in flood)
        assert statuses == {200: 20, 429: 280}
        other = connections.enter_context(send(server, "b"))
        assert read_head(other)[0] == 200
        running.close()
        # One turn of the flood may go first: its project has waited longer.
        read_until(other, b"response.completed")
        assert server.peak_mb() < 300
        assert server.longest_block() < MAX_BLOCK


def test_background_flood_is_refused_and_foreground_goes_first(victim: StartVictim) -> None:
    server = victim(
        script=HOLD,
        api_keys=KEYS,
        background_slots=2,
        background_queued=30,
        background_queued_per_project=20,
        **AT_ONCE,
    )

    def create(project: str) -> tuple[int, str | None]:
        body = {"model": "scripted", "input": "hold", "background": True}
        answer = server.ask("POST", "/v1/responses", body, headers={"Authorization": f"Bearer {project}"})
        assert ("retry-after" in answer.headers) == (answer.status != 200)
        return answer.status, answer.json["error"] and answer.json["error"]["code"]

    with ExitStack() as connections:
        running = connections.enter_context(send(server, "a", "hold"))
        read_until(running, b"begun")
        created = Counter(create("a") for _ in range(40))
        # Up to two more than the queue holds have left it: they are in progress, and wait for the model.
        assert created.keys() == {(200, None), (429, "rate_limit_exceeded")}
        assert 20 <= created[200, None] <= 22
        created = Counter(create("b") for _ in range(20)) + Counter(create("c") for _ in range(5))
        assert (503, "server_overloaded") in created
        assert created[200, None] <= 12
        foreground = connections.enter_context(send(server, "a"))
        assert read_head(foreground)[0] == 200
        running.close()
        read_until(foreground, b"response.completed")  # a background turn would hold the only slot for an hour


def test_queue_of_an_upstream_is_bounded_and_a_fallback_takes_over(
    victim: StartVictim, upstream: Callable[..., ThreadedServer]
) -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "begun"}}]}\n\n'
    slow = upstream(stream_of(chunk, STALL))
    backends = {
        "slow": {"kind": "chat_completions", "base_url": slow.url, "models": ["m"], "max_concurrent": 1},
        "spare": {"kind": "scripted"},
    }
    models = {"m": "slow/m", "either": ["slow/m", "spare/scripted"]}
    server = victim(backends=backends, models=models, queued_per_project=1, **AT_ONCE)
    body = {"model": "m", "input": "hi"}
    with ExitStack() as connections:
        read_until(connections.enter_context(send(server, "none", model="m")), b"begun")
        assert read_head(connections.enter_context(send(server, "none", model="m")))[0] == 200
        refused = server.ask("POST", "/v1/responses", body)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.ask("POST", "/v1/responses", body | {"model": "either"}).json["served_by"] == "spare/scripted"
        assert len(slow.server.requests) == 1


WINDOW = 1024


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(shallow_weights: Path) -> AsyncIterator[EmbeddedBackend]:
    backend = EmbeddedBackend(shallow_weights, context=WINDOW, slots=2, tool_examples=False)
    await backend.start()
    yield backend
    await backend.close()


def make_turn(text: str, project: str = "a", **fields: Any) -> Turn:
    body = {"model": "smollm2-135m", "input": text, "temperature": 0, "max_output_tokens": 1}
    request = codec.decode_request(json.dumps(body).encode()).body
    return Turn(request=request, items=[Message("user", text)], project=project, **fields)


async def run(backend: EmbeddedBackend, turn: Turn, name: str, ended: list[str]) -> None:
    await drain(await backend.stream(turn), name, ended)


async def drain(deltas: Deltas, name: str, ended: list[str]) -> None:
    batches = [batch async for batch in deltas]
    assert batches[-1][-1] == Finish("length")
    ended.append(name)


@pytest.mark.asyncio(loop_scope="module")
async def test_embedded_model_serves_projects_in_turns(backend: EmbeddedBackend) -> None:
    ended: list[str] = []
    async with asyncio.TaskGroup() as turns:
        for number in range(6):
            turns.create_task(run(backend, make_turn("Hi", background=True), f"background {number}", ended))
        for number in range(12):
            turns.create_task(run(backend, make_turn("Hi"), f"a{number}", ended))
        turns.create_task(run(backend, make_turn("Hi", "b"), "b", ended))
    # Two slots are taken when the other turns arrive. Then the projects take turns, and every eighth turn is a
    # background one. The turns of two slots can end in any order.
    assert ended.index("b") <= 6
    last = max(index for index, name in enumerate(ended) if "background" not in name)
    assert sum("background" in name for name in ended[:last]) <= 4


@pytest.mark.asyncio(loop_scope="module")
async def test_long_prompt_is_read_in_slices_between_short_ones(backend: EmbeddedBackend) -> None:
    ended: list[str] = []
    for _ in range(10):  # on a busy machine, the long prompt may be read before the short one arrives
        if ended != ["short", "long"]:
            ended = []
            long = await backend.stream(make_turn("sky blue " * 200))  # the model begins to read it
            short = await backend.stream(make_turn("Count.", "b"))
            await asyncio.gather(drain(long, "long", ended), drain(short, "short", ended))
    assert ended == ["short", "long"]


@pytest.mark.parametrize("size", [3_000_000, 400_000], ids=["by-length", "by-slices"])
@pytest.mark.asyncio(loop_scope="module")
async def test_prompt_beyond_the_window_is_refused_without_a_slot(backend: EmbeddedBackend, size: int) -> None:
    slots = [await backend.queue.acquire("a") for _ in range(2)]  # no slot is free
    tasks = [asyncio.create_task(backend.stream(make_turn("word " * (size // 5)))) for _ in range(8)]
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, ContextLengthExceeded)
        assert outcome.param == "input"
        assert f"maximum context length is {WINDOW} tokens. The input is at least " in outcome.message
    assert backend.queue.waiting == 0
    for slot in slots:
        slot.release()
