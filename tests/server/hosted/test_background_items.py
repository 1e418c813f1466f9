"""The finished items of background responses with hosted tools: while the response runs, and at its end."""

import asyncio
import base64
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from openai import OpenAI

from antiphon.protocol.response import FINAL_STATUSES
from support.crashing_server import KillableServer, StreamReader, wait_until
from support.mcp_wire_server import WireServer, serve_mcp
from support.threads import run_in_thread

SCRIPT = {
    "native_tools": ["function"],
    "rules": [
        {"last_item": "function_call_output", "text": "slow result", "answers": ["Done."]},
        {
            "last_item": "function_call_output",
            "text": "quick result",
            "answers": [[{"tool_call": {"name": "slow", "arguments": {}}}]],
        },
    ],
    "default": [{"tool_call": {"name": "quick", "arguments": {}}}],
}

SETTINGS: dict[str, Any] = {
    "outbound_allow": ["127.0.0.1"],
    "background_lease_seconds": 0.5,
    "seal_keys": [base64.b64encode(bytes(32)).decode()],
}
# No lease of this length expires in a test: the other process does not repeat the calls of one that was stopped.
LONG_LEASE = {"background_lease_seconds": 3600}

StartServer = Callable[..., KillableServer]
Connect = Callable[[KillableServer], OpenAI]


class Gate:
    """The answers of the tools: a call of `slow` waits until the gate is open."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    async def answer_quick(self, _: dict[str, Any]) -> str:
        return "quick result"

    async def answer_slow(self, _: dict[str, Any]) -> str:
        await asyncio.to_thread(self.opened.wait)
        return "slow result"


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def mcp(gate: Gate) -> Iterator[WireServer]:
    with run_in_thread(serve_mcp({"quick": gate.answer_quick, "slow": gate.answer_slow})) as wire:
        wire.annotations = {"slow": {"idempotentHint": True}}
        yield wire
        gate.opened.set()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    servers: list[KillableServer] = []

    def start(**settings: Any) -> KillableServer:
        server = KillableServer(tmp_path, SCRIPT, **SETTINGS | settings)
        servers.append(server)
        return server

    yield start
    for server in servers:
        with contextlib.suppress(ValueError):  # killed by the test
            server.kill()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return a function that makes a client. It is closed: a test warns if its sockets are garbage collected."""
    with contextlib.ExitStack() as clients:

        def make_client(server: KillableServer) -> OpenAI:
            client = OpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0)
            return clients.enter_context(client)

        yield make_client


def begin(server: KillableServer, mcp: WireServer) -> str:
    """Begin a response and return its id when its first call has ended and its second one waits."""
    tool = {"type": "mcp", "server_label": "s", "server_url": mcp.url, "require_approval": "never"}
    response_id = server.start_background("go", tools=[tool])
    wait_until(lambda: [name for name, _ in mcp.calls] == ["quick", "slow"])
    return response_id


def show(response: Any) -> tuple[str, list[Any]]:
    return response.status, [(item.type, getattr(item, "name", None), item.status) for item in response.output[1:]]


@pytest.mark.parametrize("nodes", ["workers", "postgresql"])
def test_poll_shows_finished_items_in_every_process(
    start_server: StartServer,
    connect: Connect,
    mcp: WireServer,
    gate: Gate,
    request: pytest.FixtureRequest,
    nodes: str,
) -> None:
    if nodes == "workers":
        servers = [start_server(workers=2, **LONG_LEASE)] * 8  # connections reach both workers
    else:
        url = request.getfixturevalue("postgres_url")
        servers = [start_server(store=url, **LONG_LEASE), start_server(store=url, **LONG_LEASE)]
    response_id = begin(servers[0], mcp)
    clients = [connect(server) for server in servers]
    finished = [("mcp_call", "quick", "completed")]
    wait_until(lambda: len(clients[0].responses.retrieve(response_id).output) == 2)
    progress = [client.responses.retrieve(response_id) for client in clients]
    assert [show(each) for each in progress] == [("in_progress", finished)] * len(clients)
    assert [each.output for each in progress] == [progress[0].output] * len(clients)

    gate.opened.set()
    wait_until(lambda: clients[0].responses.retrieve(response_id).status == "completed")
    completed = [client.responses.retrieve(response_id) for client in clients]
    assert completed == [completed[0]] * len(clients)
    assert completed[0].output[:2] == progress[0].output
    rest = [("mcp_call", "slow", "completed"), ("message", None, "completed")]
    assert show(completed[0]) == ("completed", [*finished, *rest])


def test_cancelled_response_keeps_finished_items(start_server: StartServer, connect: Connect, mcp: WireServer) -> None:
    server = start_server()
    response_id = begin(server, mcp)
    cancelled = connect(server).responses.cancel(response_id)
    assert show(cancelled) == ("cancelled", [("mcp_call", "quick", "completed"), ("mcp_call", "slow", "incomplete")])
    assert connect(server).responses.retrieve(response_id) == cancelled


def crash(server: KillableServer, client: OpenAI, mcp: WireServer, *, is_watched: bool) -> tuple[str, list[Any]]:
    """Kill a server that runs a response. Return the id of the response and the items that it had finished."""
    response_id = begin(server, mcp)
    wait_until(lambda: len(client.responses.retrieve(response_id).output) == 2)
    before = client.responses.retrieve(response_id).output
    if is_watched:
        StreamReader(server, response_id).wait_for(b'"slow"')
    server.kill()
    return response_id, before


@pytest.mark.parametrize("is_watched", [False, True])
def test_items_before_a_crash_stay_if_the_tool_cannot_be_opened_again(
    start_server: StartServer, connect: Connect, mcp: WireServer, *, is_watched: bool
) -> None:
    server = start_server()
    response_id, before = crash(server, connect(server), mcp, is_watched=is_watched)

    server = start_server(outbound_allow=[])
    wait_until(lambda: server.status(response_id) in FINAL_STATUSES)
    failed = connect(server).responses.retrieve(response_id)
    assert failed.error is not None
    assert (failed.status, failed.error.code) == ("failed", "invalid_value")
    assert failed.output[:2] == before


@pytest.mark.parametrize("is_watched", [False, True])
def test_items_before_a_crash_stay_if_the_response_is_cancelled_after_it(
    start_server: StartServer, connect: Connect, mcp: WireServer, *, is_watched: bool
) -> None:
    server = start_server()
    response_id, before = crash(server, connect(server), mcp, is_watched=is_watched)
    server = start_server()
    cancelled = connect(server).responses.cancel(response_id)
    assert (cancelled.status, cancelled.output[:2]) == ("cancelled", before)
