"""The WebSocket connection of the OpenAI SDK for Python."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from openai.resources.responses.responses import AsyncResponsesConnection
from openai.types.responses import ResponseSteerAcceptedEvent, ResponseSteerFailedEvent, ResponseSteerPendingEvent

from support.live_server import LiveServer

CALL = {"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}}
SCRIPT = {
    "rules": [
        {"user": "slowly", "answers": [[{"text": "One "}, {"wait": "gate"}, {"text": "two."}]]},
        {"user": "call", "answers": [[CALL, {"wait": "gate"}]]},
    ],
    "default": "{history} {input}",
}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


@pytest.fixture(scope="module")
def running(serve: Callable[..., LiveServer]) -> LiveServer:
    return serve(SCRIPT)


@pytest.fixture
async def connection(running: LiveServer) -> AsyncIterator[AsyncResponsesConnection]:
    async with running.async_client() as client, client.responses.connect() as connection:
        yield connection


async def read(connection: AsyncResponsesConnection, *, ends: int = 1) -> list[Any]:
    """Read events until this many responses have ended."""
    events: list[Any] = []
    while ends:
        events.append(await connection.recv())
        ends -= events[-1].type in TERMINAL or getattr(events[-1], "status", None) is not None
    return events


def text_of(event: Any) -> str:
    return event.response.output_text


async def test_turns_continue_without_being_stored(connection: AsyncResponsesConnection) -> None:
    await connection.response.create(
        model="scripted", input=[], instructions="Be brief.", generate=False, store=False, tools=[TOOL]
    )
    prepared = (await read(connection))[-1].response
    assert (prepared.status, prepared.output) == ("completed", [])
    for history in ("1", "3"):
        await connection.response.create(model="scripted", input="hi", store=False, previous_response_id=prepared.id)
        events = await read(connection)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert text_of(events[-1]) == f"{history} hi"
        prepared = events[-1].response


async def test_two_lanes_run_concurrently(running: LiveServer, connection: AsyncResponsesConnection) -> None:
    await connection.response.create(model="scripted", input="slowly", stream_id="slow")
    running.wait_for(lambda: running.backend.reached("gate"))
    await connection.response.create(model="scripted", input="hi", stream_id="quick")
    first = await read(connection)
    assert (first[-1].stream_id, text_of(first[-1])) == ("quick", "1 hi")
    running.do(lambda: running.backend.release("gate"))
    rest = await read(connection)
    assert ({event.stream_id for event in rest}, text_of(rest[-1])) == ({"slow"}, "One two.")
    assert {event.stream_id for event in first} == {"slow", "quick"}


async def test_response_is_steered(running: LiveServer, connection: AsyncResponsesConnection) -> None:
    await connection.response.create(model="scripted", input="slowly", stream_id="a")
    created = await connection.recv()
    running.wait_for(lambda: running.backend.reached("gate"))
    await connection.response.steer(input="turn left", previous_response_id=created.response.id)
    events = await read(connection, ends=2)
    (accepted,) = (event for event in events if isinstance(event, ResponseSteerAcceptedEvent))
    steered, successor = (event for event in events if event.type in TERMINAL)
    assert (accepted.steer.previous_response_id, accepted.stream_id) == (created.response.id, "a")
    assert steered.response.incomplete_details.reason == "steered"
    assert (successor.response.previous_response_id, text_of(successor)) == (created.response.id, "3 turn left")


async def test_steering_waits_for_the_output_of_a_call(
    running: LiveServer, connection: AsyncResponsesConnection
) -> None:
    await connection.response.create(model="scripted", input="call", tools=[TOOL], store=False)
    created = await connection.recv()
    running.wait_for(lambda: running.backend.reached("gate"))
    await connection.response.steer(input="turn left", previous_response_id=created.response.id)
    while not isinstance(await connection.recv(), ResponseSteerAcceptedEvent):
        pass
    running.do(lambda: running.backend.release("gate"))
    await read(connection)
    pending = await connection.recv()
    assert isinstance(pending, ResponseSteerPendingEvent)
    outputs: Any = [{**each.to_dict(), "output": "rain"} for each in pending.required_input]
    await connection.response.create(
        model="scripted", input=outputs, store=False, previous_response_id=created.response.id
    )
    assert text_of((await read(connection))[-1]) == "4 turn left"


async def test_steering_of_an_unknown_response_returns_the_input(connection: AsyncResponsesConnection) -> None:
    await connection.response.steer(input="turn left", previous_response_id="resp_unknown")
    failed = await connection.recv()
    assert isinstance(failed, ResponseSteerFailedEvent)
    assert (failed.error.code, failed.steer.input) == ("response_not_found", "turn left")


async def test_error_is_an_event_and_the_connection_stays_open(connection: AsyncResponsesConnection) -> None:
    await connection.response.create(model="scripted", input="hi", temperature=3)
    error: Any = await connection.recv()
    assert (error.type, error.status, error.error.param) == ("error", 400, "temperature")
    await connection.response.create(model="scripted", input="hi")
    assert text_of((await read(connection))[-1]) == "1 hi"


def test_synchronous_client_is_served_over_websocket(running: LiveServer) -> None:
    with running.client() as client, client.responses.connect() as connection:
        connection.response.create(model="scripted", input="hi")
        for event in connection:
            if event.type == "response.completed":
                break
    assert event.response.output_text == "1 hi"
