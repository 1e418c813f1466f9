"""Cassettes: the same answers again, without the model, or a miss that says why."""

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


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": [{"role": "user", "content": text}]} | fields


async def listen(transport: Transport, request: dict[str, Any]) -> list[Any]:
    batches = await transport.stream(request)
    return [json.loads(codec.encode(event)) async for batch in batches for event in batch]


def read(path: Path) -> str:
    return path.read_text("utf-8")


def text_of(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def test_what_was_recorded_is_replayed_event_for_event(model: ScriptedTransport, path: Path) -> None:
    recorded = await listen(Cassette(path, model, mode="record"), ask("hello"))
    replayed = await listen(Cassette(path, mode="replay"), ask("hello"))
    assert replayed == recorded
    assert text_of(replayed) == "You said: hello"
    assert len(model.requests) == 1


@pytest.mark.parametrize("state", ["client", "server"])
async def test_a_whole_run_replays_without_the_model(model: ScriptedTransport, path: Path, state: Any) -> None:
    def make(transport: Transport) -> Agent:
        return Agent(model="scripted", transport=transport, tools=[look_up], state=state)

    first = await make(Cassette(path, model)).run("weather?", run_id="run_1")
    asked = len(model.requests)
    again = await make(Cassette(path, model)).run("weather?", run_id="run_1")
    assert (first.kind, first.text, first.tool_calls, asked) == ("final", "It is 10 degrees.", 1, 2)
    assert again.history == first.history
    assert len(model.requests) == asked


async def test_ids_of_another_run_make_no_difference(model: ScriptedTransport, path: Path) -> None:
    """A process that goes on with a run has ids that this cassette never saw."""

    def continue_(call_id: str) -> dict[str, Any]:
        call = {
            "type": "function_call",
            "call_id": call_id,
            "name": "look_up",
            "arguments": "{}",
            "id": f"fc_{call_id}",
        }
        output = {"type": "function_call_output", "call_id": call_id, "output": "Bern: 10"}
        return ask("weather") | {"input": [*ask("weather")["input"], call, output], "metadata": {"run": call_id}}

    await listen(Cassette(path, model, mode="record"), continue_("call_1"))
    assert text_of(await listen(Cassette(path, mode="replay"), continue_("call_2"))) == "It is 10 degrees."


async def test_two_continuations_with_the_same_words_are_kept_apart(model: ScriptedTransport, path: Path) -> None:
    async def converse(transport: Transport) -> list[str]:
        provider = Provider(transport, model="scripted")
        turn = await provider.generate_responses_turn(None, "history {history}")
        said = []
        for _ in range(2):
            turn = await provider.generate_responses_turn(turn.response_id, "go on")
            said.append(turn.response_id)
        return said

    recorded = await converse(Cassette(path, model, mode="record"))
    assert await converse(Cassette(path, mode="replay")) == recorded
    assert len(set(recorded)) == 2


async def test_a_request_made_again_gets_the_answers_in_their_order(model: ScriptedTransport, path: Path) -> None:
    recording = Cassette(path, model, mode="record")
    for _ in range(2):
        await listen(recording, ask("again"))
    replaying = Cassette(path, mode="replay")
    said = [text_of(await listen(replaying, ask("again"))) for _ in range(3)]
    assert said == ["One.", "Two.", "Two."]


async def test_recording_replaces_what_is_asked_and_keeps_the_rest(model: ScriptedTransport, path: Path) -> None:
    first = Cassette(path, model, mode="record")
    await listen(first, ask("again"))
    await listen(first, ask("hello"))
    await listen(Cassette(path, model, mode="record"), ask("again"))
    replaying = Cassette(path, mode="replay")
    assert text_of(await listen(replaying, ask("again"))) == "Two."
    assert text_of(await listen(replaying, ask("hello"))) == "You said: hello"


async def test_a_miss_shows_how_the_request_differs_from_the_nearest_one(model: ScriptedTransport, path: Path) -> None:
    recording = Cassette(path, model, mode="record")
    await listen(recording, ask("something else altogether", temperature=1.0))
    await listen(recording, ask("hello", instructions="Be kind.", temperature=0.5))
    with pytest.raises(CassetteMiss) as missed:
        await Cassette(path, mode="replay").stream(ask("hello", instructions="Be brief.", temperature=0.5))
    assert str(missed.value) == (
        f"This request is not on the cassette {path}. The nearest one that is:\n"
        "--- recorded\n"
        "+++ asked\n"
        "@@ -6,5 +6,5 @@\n"
        "     }\n"
        "   ],\n"
        '-  "instructions": "Be kind.",\n'
        '+  "instructions": "Be brief.",\n'
        '   "model": "scripted",\n'
        '   "temperature": 0.5'
    )


async def test_a_miss_is_not_taken_for_a_failure_of_the_model(model: ScriptedTransport, path: Path) -> None:
    await listen(Cassette(path, model, mode="record"), ask("hello"))
    with pytest.raises(CassetteMiss):
        await Agent(model="scripted", transport=Cassette(path, mode="replay")).run("Something new.")
    with pytest.raises(CassetteMiss, match="is empty"):
        await Cassette(path.with_name("none.json")).stream(ask("hello"))


async def test_errors_are_recorded_and_raised_again(model: ScriptedTransport, path: Path) -> None:
    recording = Cassette(path, model, mode="record")
    with pytest.raises(RateLimited, match="Slow down"):
        await recording.stream(ask("fail"))
    broken = await listen(recording, ask("break"))
    replaying = Cassette(path, mode="replay")
    with pytest.raises(RateLimited, match="Slow down"):
        await replaying.stream(ask("fail"))
    assert await listen(replaying, ask("break")) == broken


class Breaking:
    """A connection that breaks after the first events."""

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


async def test_a_stream_that_broke_breaks_again_at_the_same_place(model: ScriptedTransport, path: Path) -> None:
    async def hear(transport: Transport) -> list[str]:
        heard: list[str] = []
        with pytest.raises(UpstreamError, match="broke"):
            async for batch in await transport.stream(ask("hello")):
                heard += [event.type for event in batch]
        return heard

    recorded = await hear(Cassette(path, Breaking(model), mode="record"))
    assert await hear(Cassette(path, mode="replay")) == recorded != []
    assert "models.example" not in read(path)


async def test_an_answer_that_nobody_heard_to_its_end_is_not_recorded(model: ScriptedTransport, path: Path) -> None:
    recording = Cassette(path, model, mode="record")
    events = await recording.stream(ask("hello"))
    await anext(events)
    await events.aclose()
    with pytest.raises(ConfigError, match="There is no cassette"):
        Cassette(path, mode="replay")


async def test_the_file_can_be_read_by_people_and_holds_no_secrets(model: ScriptedTransport, path: Path) -> None:
    tools = [
        {
            "type": "mcp",
            "server_label": "s",
            "server_url": "https://mcp.example",
            "authorization": "secret-1",
            "headers": {"X-Anything": "secret-2"},
        }
    ]
    await listen(Cassette(path, model, mode="record"), ask("hello", tools=tools, user="me"))
    written = read(path)
    assert "secret" not in written
    assert next(line for line in written.splitlines() if "content" in line) == '            "content": "hello"'
    assert json.loads(written)["exchanges"][0]["request"] == {
        "model": "scripted",
        "input": [{"role": "user", "content": "hello"}],
        "tools": [tools[0] | {"authorization": "***", "headers": {"X-Anything": "***"}}],
    }
    assert all(line.count('"type": "response.') <= 1 for line in written.splitlines())


async def test_what_differs_each_time_can_be_normalised(model: ScriptedTransport, path: Path) -> None:
    def forget_the_date(request: dict[str, Any]) -> dict[str, Any]:
        return request | {"instructions": "The date."}

    recording = Cassette(path, model, mode="record", normalise=forget_the_date)
    await listen(recording, ask("hello", instructions="It is Monday."))
    replaying = Cassette(path, mode="replay", normalise=forget_the_date)
    assert text_of(await listen(replaying, ask("hello", instructions="It is Tuesday."))) == "You said: hello"


def test_what_cannot_be_is_refused_at_once(model: ScriptedTransport, path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a transport"):
        Cassette(path, mode="record")
    with pytest.raises(ConfigError, match="There is no cassette"):
        Cassette(path, mode="replay")
    path.parent.mkdir()
    path.write_text('{"version": 2, "exchanges": []}')
    with pytest.raises(ConfigError, match=r"is not a cassette: .*version"):
        Cassette(path)
