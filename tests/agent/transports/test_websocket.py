"""The transport over WebSockets: real turns on a real server, and servers that do not do what they should."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from antiphon import Agent, ConfigError, WebSocketTransport, tool
from antiphon.agent.transports.base import ResponseCollector
from antiphon.errors import AntiphonError, InvalidRequest, RateLimited, UpstreamError, UpstreamTimeout
from support.scripted_model import HOLD, AntiphonModel, SharedServer, call

COMPLETED = json.dumps({"type": "response.completed", "response": {"id": "r", "status": "completed", "output": []}})
Serve = Callable[[ServerConnection], Coroutine[Any, Any, None]]


@pytest.fixture
async def model(shared_server: SharedServer) -> AsyncIterator[AntiphonModel]:
    transport = WebSocketTransport(f"{shared_server.server.url}/v1")
    yield AntiphonModel(shared_server.backend, transport, shared_server.server)
    await transport.close()


@asynccontextmanager
async def open_server(handle: Serve) -> AsyncIterator[str]:
    async with serve(handle, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"


async def ask(transport: WebSocketTransport, text: str = "hi") -> dict[str, Any]:
    collector = ResponseCollector()
    async with aclosing(await transport.stream({"model": "m", "input": text})) as events:
        async for batch in events:
            collector.feed(batch)
    return collector.finish()


def no_wait(waits: list[float]) -> Callable[[float], Coroutine[Any, Any, None]]:
    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    return sleep


# A real server


async def test_run_with_tools_uses_one_connection(model: AntiphonModel) -> None:
    @tool
    def look(city: str) -> str:
        """Look."""
        return f"{city}: mild"

    model.set_answers([call("look", {"city": "Bern"})], "It is mild.")
    outcome = await model.agent(tools=[look]).run("Go.")
    assert (outcome.kind, outcome.text, outcome.turns) == ("final", "It is mild.", 2)
    transport = model.transport._inner
    assert isinstance(transport, WebSocketTransport)
    assert [len(idle) for idle in transport._idle.values()] == [1]


@pytest.mark.parametrize("state", ["client", "server"])
async def test_both_states_of_the_conversation_work(model: AntiphonModel, state: Any) -> None:
    model.set_answers([call("look", {})], "Done.")
    look = tool(name="look", description="Look.")(lambda: "mild")
    outcome = await model.agent(tools=[look], conversation_state=state).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "Done.")
    assert ("previous_response_id" in model.sent[1]) is (state == "server")


async def test_runs_at_once_use_several_connections(model: AntiphonModel) -> None:
    model.set_answers("Hello.")
    agent = model.agent()
    outcomes = await asyncio.gather(*(agent.run("Go.") for _ in range(12)))
    assert [outcome.text for outcome in outcomes] == ["Hello."] * 12
    transport = model.transport._inner
    assert isinstance(transport, WebSocketTransport)
    assert all(1 <= len(idle) <= 8 for idle in transport._idle.values())


async def test_rejected_request_is_raised(model: AntiphonModel) -> None:
    agent = model.agent(model="missing")
    outcome = await agent.run("Go.")
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.code) == ("failed", "model_not_found")


async def test_cancelled_run_stops_the_model(model: AntiphonModel) -> None:
    model.set_answers([{"text": "It is"}, HOLD, {"text": " mild."}])
    run = asyncio.create_task(model.agent().run("Go."))
    await model.until_held()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    transport = model.transport._inner
    assert isinstance(transport, WebSocketTransport)
    assert not any(transport._idle.values())


def test_agent_runs_in_several_event_loops(shared_server: SharedServer) -> None:
    transport = WebSocketTransport(f"{shared_server.server.url}/v1")
    AntiphonModel(shared_server.backend, transport, shared_server.server).set_answers("Hello.")
    agent = Agent(model="scripted", transport=transport)
    assert [agent.run_sync("Go.").text for _ in range(2)] == ["Hello.", "Hello."]
    assert transport._idle == {}


# Other servers


async def test_request_is_a_message_with_the_key_in_the_handshake() -> None:
    received: list[Any] = []

    async def handle(connection: ServerConnection) -> None:
        assert connection.request is not None
        received.append((connection.request.path, connection.request.headers["Authorization"]))
        received.append(json.loads(await connection.recv()))
        await connection.send(COMPLETED)

    async with open_server(handle) as url:
        transport = WebSocketTransport(f"{url}?version=1", api_key="sk-1")
        await ask(transport)
        await transport.close()
    assert received == [
        ("/v1/responses?version=1", "Bearer sk-1"),
        {"type": "response.create", "model": "m", "input": "hi"},
    ]


async def test_authorization_header_replaces_the_key_in_the_handshake() -> None:
    keys: list[list[str]] = []

    async def serve_one(socket: ServerConnection) -> None:
        assert socket.request is not None
        keys.append(socket.request.headers.get_all("Authorization"))
        await socket.recv()
        await socket.send(COMPLETED)

    async with open_server(serve_one) as url:
        transport = WebSocketTransport(url, api_key="sk-1", headers={"authorization": "Basic YQ=="})
        await ask(transport)
        await transport.close()
    assert keys == [["Basic YQ=="]]


async def test_closed_idle_connection_is_replaced() -> None:
    count = 0

    async def handle(connection: ServerConnection) -> None:
        nonlocal count
        count += 1
        await connection.recv()
        await connection.send(COMPLETED)
        if count == 2:
            await connection.wait_closed()

    async with open_server(handle) as url:
        transport = WebSocketTransport(url)
        for _ in range(2):
            assert (await ask(transport))["id"] == "r"
        await transport.close()
    assert count == 2


@pytest.mark.parametrize(
    ("status", "kind", "attempts"), [(400, InvalidRequest, 1), (429, RateLimited, 3), (503, AntiphonError, 3)]
)
async def test_rejection_is_retried_if_it_is_transient(status: int, kind: type[Exception], attempts: int) -> None:
    requests: list[Any] = []
    error = {
        "message": "No.",
        "type": "invalid_request_error" if status == 400 else "x",
        "code": None,
        "param": "input",
    }

    async def handle(connection: ServerConnection) -> None:
        async for message in connection:
            requests.append(message)
            await connection.send(json.dumps({"type": "error", "status": status, "error": error}))

    waits: list[float] = []
    async with open_server(handle) as url:
        transport = WebSocketTransport(url, retries=2, sleep=no_wait(waits))
        with pytest.raises(kind):
            await ask(transport)
        await transport.close()
    assert (len(requests), len(waits)) == (attempts, attempts - 1)


async def test_error_within_a_stream_ends_it() -> None:
    async def handle(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send('{"type":"response.created","response":{"id":"r","status":"in_progress","output":[]}}')
        await connection.send('{"type":"error","code":"server_error","message":"Broken.","param":null}')

    async with open_server(handle) as url:
        transport = WebSocketTransport(url)
        with pytest.raises(AntiphonError, match="Broken"):
            await ask(transport)
        await transport.close()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "closed the connection"),
        (['{"type":"response.output_text.delta"}'], "closed the connection"),
        (["no JSON"], "not JSON"),
    ],
    ids=["nothing", "a part", "no JSON"],
)
async def test_broken_stream_is_an_error(messages: list[str], reason: str) -> None:
    async def handle(connection: ServerConnection) -> None:
        await connection.recv()
        for message in messages:
            await connection.send(message)

    async with open_server(handle) as url:
        transport = WebSocketTransport(url, retries=0)
        with pytest.raises(UpstreamError, match=reason):
            await ask(transport)
        assert not any(transport._idle.values())


async def test_server_that_sends_nothing_is_given_up() -> None:
    async def handle(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async with open_server(handle) as url:
        transport = WebSocketTransport(url, retries=0, idle_timeout=0.05)
        with pytest.raises(UpstreamTimeout, match=r"sent nothing for 0\.05 s"):
            await ask(transport)


async def test_server_without_websockets_is_an_error(shared_server: SharedServer) -> None:
    transport = WebSocketTransport(f"{shared_server.server.url}/v2", retries=0)
    with pytest.raises(AntiphonError) as raised:
        await ask(transport)
    assert raised.value.status in (400, 403, 404)
    with pytest.raises(UpstreamError, match=r"^The server refuses connections: 127\.0\.0\.1:1\. Is it running"):
        await ask(WebSocketTransport("http://127.0.0.1:1/v1", retries=0))


@pytest.mark.parametrize("url", ["127.0.0.1:8484/v1", "ftp://host/v1", "http:///v1"])
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        WebSocketTransport(url)
