"""Cassettes: recording, replay without the model, and misses."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from antiphon import Agent, tool
from antiphon.agent.provider import Provider
from antiphon.agent.transports.base import Transport
from antiphon.errors import ConfigError, RateLimited, UpstreamError
from antiphon.protocol import codec
from antiphon.testing.cassette import Cassette, CassetteMiss
from antiphon.testing.scripted import ScriptedTransport

SCRIPT: dict[str, Any] = {
    "rules": [
        {"last_item": "function_call_output", "answers": ["It is 10 degrees."]},
        {"user": "weather", "answers": [[{"tool_call": {"name": "look_up", "arguments": {"city": "Bern"}}}]]},
        {
            "user": "fail",
            "answers": [[{"raise": {"message": "Slow down.", "status": 429, "type": "rate_limit_error"}}]],
        },
        {"user": "break", "answers": [[{"text": ["Half "]}, {"raise": {"message": "Gone.", "status": 502}}]]},
        {"user": "again", "answers": ["One.", "Two."]},
    ]
}


@tool
def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: 10"


@pytest.fixture
async def model() -> AsyncIterator[ScriptedTransport]:
    model = ScriptedTransport(SCRIPT)
    yield model
    await model.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cassettes" / "test.json"


def make_request(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": [{"role": "user", "content": text}]} | fields


async def collect_events(transport: Transport, request: dict[str, Any]) -> list[Any]:
    batches = await transport.stream(request)
    return [json.loads(codec.encode(event)) async for batch in batches for event in batch]


def read_file(path: Path) -> str:
    return path.read_text("utf-8")


def join_text(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def test_recording_is_replayed_event_for_event(model: ScriptedTransport, path: Path) -> None:
    recorded = await collect_events(Cassette(path, model, mode="record"), make_request("hello"))
    replayed = await collect_events(Cassette(path, mode="replay"), make_request("hello"))
    assert replayed == recorded
    assert join_text(replayed) == "You said: hello"
    assert len(model.requests) == 1


@pytest.mark.parametrize("state", ["client", "server"])
async def test_whole_run_replays_without_the_model(model: ScriptedTransport, path: Path, state: Any) -> None:
    def make(transport: Transport) -> Agent:
        return Agent(model="scripted", transport=transport, tools=[look_up], conversation_state=state)

    first = await make(Cassette(path, model)).run("weather?", run_id="run_1")
    sent = len(model.requests)
    again = await make(Cassette(path, model)).run("weather?", run_id="run_1")
    assert (first.kind, first.text, first.tool_calls, sent) == ("final", "It is 10 degrees.", 1, 2)
    assert again.history == first.history
    assert len(model.requests) == sent


async def test_ids_of_another_run_are_ignored(model: ScriptedTransport, path: Path) -> None:
    """A process that resumes a run has new ids."""

    def make_continuation(call_id: str) -> dict[str, Any]:
        call = {
            "type": "function_call",
            "call_id": call_id,
            "name": "look_up",
            "arguments": "{}",
            "id": f"fc_{call_id}",
        }
        output = {"type": "function_call_output", "call_id": call_id, "output": "Bern: 10"}
        return make_request("weather") | {
            "input": [*make_request("weather")["input"], call, output],
            "metadata": {"run": call_id},
        }

    await collect_events(Cassette(path, model, mode="record"), make_continuation("call_1"))
    assert (
        join_text(await collect_events(Cassette(path, mode="replay"), make_continuation("call_2")))
        == "It is 10 degrees."
    )


async def test_equal_requests_after_different_responses_stay_separate(model: ScriptedTransport, path: Path) -> None:
    async def converse(transport: Transport) -> list[str]:
        provider = Provider(transport, model="scripted")
        turn = await provider.generate_responses_turn(None, "history {history}")
        response_ids = []
        for _ in range(2):
            turn = await provider.generate_responses_turn(turn.response_id, "go on")
            response_ids.append(turn.response_id)
        return response_ids

    recorded = await converse(Cassette(path, model, mode="record"))
    assert await converse(Cassette(path, mode="replay")) == recorded
    assert len(set(recorded)) == 2


async def test_repeated_request_gets_answers_in_recorded_order(model: ScriptedTransport, path: Path) -> None:
    recording = Cassette(path, model, mode="record")
    for _ in range(2):
        await collect_events(recording, make_request("again"))
    replaying = Cassette(path, mode="replay")
    texts = [join_text(await collect_events(replaying, make_request("again"))) for _ in range(3)]
    assert texts == ["One.", "Two.", "Two."]


async def test_record_mode_replaces_only_repeated_requests(model: ScriptedTransport, path: Path) -> None:
    first = Cassette(path, model, mode="record")
    await collect_events(first, make_request("again"))
    await collect_events(first, make_request("hello"))
    await collect_events(Cassette(path, model, mode="record"), make_request("again"))
    replaying = Cassette(path, mode="replay")
    assert join_text(await collect_events(replaying, make_request("again"))) == "Two."
    assert join_text(await collect_events(replaying, make_request("hello"))) == "You said: hello"


async def test_miss_shows_difference_to_nearest_request(model: ScriptedTransport, path: Path) -> None:
    recording = Cassette(path, model, mode="record")
    await collect_events(recording, make_request("something else altogether", temperature=1.0))
    await collect_events(recording, make_request("hello", instructions="Be kind.", temperature=0.5))
    with pytest.raises(CassetteMiss) as missed:
        await Cassette(path, mode="replay").stream(make_request("hello", instructions="Be brief.", temperature=0.5))
    assert str(missed.value) == (
        f"This request is not on the cassette {path}. Difference to the nearest recorded one:\n"
        "--- recorded\n"
        "+++ requested\n"
        "@@ -6,5 +6,5 @@\n"
        "     }\n"
        "   ],\n"
        '-  "instructions": "Be kind.",\n'
        '+  "instructions": "Be brief.",\n'
        '   "model": "scripted",\n'
        '   "temperature": 0.5'
    )


async def test_miss_is_not_handled_as_a_model_failure(model: ScriptedTransport, path: Path) -> None:
    await collect_events(Cassette(path, model, mode="record"), make_request("hello"))
    with pytest.raises(CassetteMiss):
        await Agent(model="scripted", transport=Cassette(path, mode="replay")).run("Something new.")
    with pytest.raises(CassetteMiss, match="is empty"):
        await Cassette(path.with_name("none.json")).stream(make_request("hello"))


async def test_errors_are_recorded_and_replayed(model: ScriptedTransport, path: Path) -> None:
    recording = Cassette(path, model, mode="record")
    with pytest.raises(RateLimited, match="Slow down"):
        await recording.stream(make_request("fail"))
    broken = await collect_events(recording, make_request("break"))
    replaying = Cassette(path, mode="replay")
    with pytest.raises(RateLimited, match="Slow down"):
        await replaying.stream(make_request("fail"))
    assert await collect_events(replaying, make_request("break")) == broken


class BreakingTransport:
    """A transport that fails after the first events."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    async def stream(self, request: dict[str, Any]) -> Any:
        return self._break(await self._inner.stream(request))

    async def _break(self, events: Any) -> Any:
        yield await anext(events)
        await events.aclose()
        raise UpstreamError("The connection to https://models.example/v1 broke.")

    async def close(self) -> None:
        await self._inner.close()


async def test_broken_stream_breaks_at_the_same_event(model: ScriptedTransport, path: Path) -> None:
    async def read_types(transport: Transport) -> list[str]:
        types: list[str] = []
        with pytest.raises(UpstreamError, match="broke"):
            async for batch in await transport.stream(make_request("hello")):
                types += [event.type for event in batch]
        return types

    recorded = await read_types(Cassette(path, BreakingTransport(model), mode="record"))
    assert await read_types(Cassette(path, mode="replay")) == recorded != []
    assert "models.example" not in read_file(path)


async def test_answer_not_read_to_its_end_is_not_recorded(model: ScriptedTransport, path: Path) -> None:
    recording = Cassette(path, model, mode="record")
    events = await recording.stream(make_request("hello"))
    await anext(events)
    await events.aclose()
    with pytest.raises(ConfigError, match="There is no cassette"):
        Cassette(path, mode="replay")


async def test_file_is_readable_and_has_no_secrets(model: ScriptedTransport, path: Path) -> None:
    tools = [
        {
            "type": "mcp",
            "server_label": "s",
            "server_url": "https://mcp.example",
            "authorization": "secret-1",
            "headers": {"X-Anything": "secret-2"},
        }
    ]
    await collect_events(Cassette(path, model, mode="record"), make_request("hello", tools=tools, user="me"))
    written = read_file(path)
    assert "secret" not in written
    assert next(line for line in written.splitlines() if "content" in line) == '            "content": "hello"'
    assert json.loads(written)["exchanges"][0]["request"] == {
        "model": "scripted",
        "input": [{"role": "user", "content": "hello"}],
        "tools": [tools[0] | {"authorization": "***", "headers": {"X-Anything": "***"}}],
    }
    assert all(line.count('"type": "response.') <= 1 for line in written.splitlines())


async def test_normalise_removes_values_that_differ(model: ScriptedTransport, path: Path) -> None:
    def remove_date(request: dict[str, Any]) -> dict[str, Any]:
        return request | {"instructions": "The date."}

    recording = Cassette(path, model, mode="record", normalise=remove_date)
    await collect_events(recording, make_request("hello", instructions="It is Monday."))
    replaying = Cassette(path, mode="replay", normalise=remove_date)
    assert (
        join_text(await collect_events(replaying, make_request("hello", instructions="It is Tuesday.")))
        == "You said: hello"
    )


def test_invalid_mode_or_file_is_rejected(model: ScriptedTransport, path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a transport"):
        Cassette(path, mode="record")
    with pytest.raises(ConfigError, match="There is no cassette"):
        Cassette(path, mode="replay")
    path.parent.mkdir()
    path.write_text('{"version": 2, "exchanges": []}')
    with pytest.raises(ConfigError, match=r"is not a cassette: .*version"):
        Cassette(path)
