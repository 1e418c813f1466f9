"""Complaints about agent runtimes: agents that cannot be tested."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon import Agent, Limits, tool
from antiphon.agent.outcome import RunEvent
from antiphon.agent.transports.base import Transport
from antiphon.agent.transports.http import HttpTransport
from antiphon.testing.cassette import Cassette, CassetteMiss
from antiphon.testing.network import forbid_network
from antiphon.testing.scripted import ScriptedTransport, serve_script


def call(name: str, key: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"tool_call": {"name": name, "arguments": arguments, "call_id": f"call_{name}_{key}", "key": key}}


SCRIPT: dict[str, Any] = {
    "rules": [
        {
            "user": "trip",
            "answers": [
                [{"reasoning": "Both at once."}, call("look_up", 1, city="Bern"), call("look_up", 2, city="Rome")],
                [{"text": "One more. "}, call("book", 1, city="Rome")],
                "Rome is warmer, and booked.",
            ],
        },
    ]
}


class Desk:
    """The tools of the tests. They record their calls."""

    def __init__(self) -> None:
        self.booked: list[str] = []

    @property
    def tools(self) -> list[Any]:
        @tool
        def look_up(city: str) -> int:
            """The temperature in a city."""
            return {"Bern": 10, "Rome": 20}[city]

        @tool
        def book(city: str) -> str:
            """Book a trip."""
            self.booked.append(city)
            return "booked"

        return [look_up, book]


def make_agent(transport: Transport, desk: Desk, **options: Any) -> Agent:
    return Agent(model="scripted", transport=transport, tools=desk.tools, **options)


@pytest.fixture
async def model() -> AsyncIterator[ScriptedTransport]:
    model = ScriptedTransport(SCRIPT)
    yield model
    await model.close()


async def test_pain_agents_102_agent_on_a_script_is_deterministic() -> None:
    """Real tools, loop and engine without a model or network: every run is the same."""
    runs: list[list[str]] = []
    for _ in range(3):
        model, desk, events = ScriptedTransport(SCRIPT), Desk(), list[RunEvent]()
        with forbid_network(loopback=False):
            outcome = await make_agent(model, desk, hooks=[events.append]).run("Plan a trip.")
        await model.close()
        assert (outcome.kind, outcome.text) == ("final", "Rome is warmer, and booked.")
        assert (outcome.turns, outcome.tool_calls, desk.booked) == (3, 3, ["Rome"])
        runs.append([type(event).__name__ for event in events])
    assert runs[0] == runs[1] == runs[2]


async def test_pain_agents_103_cassette_is_keyed_by_request_and_a_miss_raises(
    model: ScriptedTransport, tmp_path: Path
) -> None:
    path = tmp_path / "trip.json"
    recording = make_agent(Cassette(path, model), Desk(), instructions="Find the warmest city.")
    await recording.run("Plan a trip.")
    replaying = make_agent(Cassette(path, mode="replay"), Desk(), instructions="Find the coldest city.")
    with pytest.raises(CassetteMiss) as missed:
        await replaying.run("Plan a trip.")
    changed = [line for line in str(missed.value).splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == [
        '-  "instructions": "Find the warmest city.",',
        '+  "instructions": "Find the coldest city.",',
    ]


async def test_pain_agents_104_script_record_and_replay_share_one_interface(
    model: ScriptedTransport, tmp_path: Path
) -> None:
    path = tmp_path / "trip.json"
    outcomes = []
    makers: list[Callable[[], Transport]] = [
        lambda: model,
        lambda: Cassette(path, ScriptedTransport(SCRIPT)),
        lambda: Cassette(path, mode="replay"),
    ]
    for make in makers:
        transport, desk = make(), Desk()
        outcome = await make_agent(transport, desk).run("Plan a trip.")
        outcomes.append((outcome.kind, outcome.text, outcome.turns, desk.booked))
        await transport.close()
    assert outcomes == [("final", "Rome is warmer, and booked.", 3, ["Rome"])] * 3


async def test_pain_agents_105_scripted_model_calls_tools_and_streams(model: ScriptedTransport) -> None:
    """The script can call functions, stream text, and be inspected afterwards."""
    events = [event async for event in make_agent(model, Desk()).run_stream("Plan a trip.")]
    kinds = [type(event).__name__ for event in events]
    assert kinds.count("ToolStarted") == kinds.count("ToolFinished") == 3
    assert "TextDelta" in kinds
    assert "ReasoningDelta" in kinds
    outputs = [item for item in model.requests[1]["input"] if item.get("type") == "function_call_output"]
    assert outputs == [
        {"type": "function_call_output", "call_id": "call_look_up_1", "output": "10"},
        {"type": "function_call_output", "call_id": "call_look_up_2", "output": "20"},
    ]


async def test_pain_agents_106_recorded_session_replaces_the_real_one(tmp_path: Path) -> None:
    """Several turns on a real server are recorded once and replayed without it, including limits."""
    path = tmp_path / "session.json"
    with serve_script(SCRIPT) as server:
        live = HttpTransport(server.base_url, api_key="sk-secret-key")
        recorded = await make_agent(Cassette(path, live), Desk(), limits=Limits(turns=5)).run("Plan a trip.")
        await live.close()
    desk = Desk()
    with forbid_network(loopback=False):
        replayed = await make_agent(Cassette(path, mode="replay"), desk, limits=Limits(turns=5)).run("Plan a trip.")
    assert (replayed.history, replayed.usage, desk.booked) == (recorded.history, recorded.usage, ["Rome"])
    written = read(path)
    assert "sk-secret-key" not in written
    assert len(json.loads(written)["exchanges"]) == 3


def read(path: Path) -> str:
    return path.read_text("utf-8")
