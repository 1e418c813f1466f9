"""Agents without a server: the configured model runs in this process."""

import asyncio
import gc
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from antiphon import Agent, tool
from antiphon.agent.outcome import Outcome
from antiphon.errors import Unavailable
from antiphon.runtime import EngineThread, InProcessTransport

SETTINGS = """
data_dir = "data"
store = "memory:"

[backends.fake]
kind = "scripted"

[backends.fake.script]
models = ["fake"]
rules = [
    {last_item = "function_call_output", answers = ["It is mild."]},
    {user = "weather", answers = [[{tool_call = {name = "look_up", arguments = {city = "Bern"}}}]]},
    {user = "count", answers = ["One.", "Two.", "Three."]},
    {user = "wait", answers = [[{text = ["So", " far"]}, {wait = "gate"}]]},
]
"""


@tool
def look_up(city: str) -> str:
    """Look up."""
    return f"{city}: mild"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert join_engines() == []  # the thread of an engine ends after the engine is closed
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "antiphon.toml"
    path.write_text(SETTINGS)
    return path


@pytest.mark.usefixtures("settings")
def test_agent_without_url_runs_the_configured_model() -> None:
    agent = Agent(model="fake", tools=[look_up])
    assert [agent.run_sync("The weather?").text for _ in range(2)] == ["It is mild."] * 2


@pytest.mark.usefixtures("settings")
async def test_concurrent_runs_share_one_engine() -> None:
    agent = Agent(model="fake", tools=[look_up])
    outcomes = await asyncio.gather(*(agent.run("The weather?") for _ in range(3)))
    assert [outcome.text for outcome in outcomes] == ["It is mild."] * 3
    await agent.close()
    await agent.close()


async def test_invalid_settings_fail_the_run_until_they_are_corrected(settings: Path) -> None:
    await asyncio.to_thread(settings.write_text, "port = 'x'")
    agent = Agent(model="fake", tools=[look_up])
    for _ in range(2):
        outcome = await agent.run("The weather?")
        assert outcome.kind == "failed"
        assert outcome.error is not None
        assert "port" in outcome.error.message
    await asyncio.to_thread(settings.write_text, SETTINGS)
    assert (await agent.run("The weather?")).text == "It is mild."
    await agent.close()


@pytest.mark.usefixtures("settings")
async def test_unknown_model_fails_the_run() -> None:
    agent = Agent(model="other")
    outcome = await agent.run("Hello")
    assert outcome.error is not None
    assert outcome.error.code == "model_not_found"
    await agent.close()


@pytest.mark.usefixtures("settings")
async def test_agents_share_one_engine_that_the_last_one_closes() -> None:
    agents = [Agent(model="fake", tools=[look_up]) for _ in range(3)]
    assert [(await agent.run("The weather?")).text for agent in agents] == ["It is mild."] * 3
    assert len(find_engines()) == 1
    for agent in agents[1:]:
        await agent.close()
    assert (await agents[0].run("The weather?")).text == "It is mild."
    del agents[1:]
    await agents[0].close()
    assert join_engines() == []


async def test_agents_with_other_settings_have_another_engine(settings: Path) -> None:
    first = Agent(model="fake")
    assert (await first.run("count")).text == "One."
    changed = SETTINGS.replace("One.", "Uno.")
    await asyncio.to_thread(settings.write_text, changed)
    second = Agent(model="fake")
    assert ((await second.run("count")).text, len(find_engines())) == ("Uno.", 2)
    await first.close()
    await second.close()
    assert join_engines() == []


def find_engines() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "antiphon-engine"]


def join_engines() -> list[threading.Thread]:
    """Wait for the engine threads. Return those that have not ended after the timeout."""
    for thread in find_engines():
        thread.join(10)
    return find_engines()


@pytest.mark.usefixtures("settings")
def test_engine_shared_by_threads_outlives_the_first_to_finish() -> None:
    meeting = threading.Barrier(2)
    first_has_ended = threading.Event()
    outcomes: list[Outcome] = []

    @tool
    def look_up(city: str) -> str:
        """Look up."""
        if meeting.wait(10) == 0:
            assert first_has_ended.wait(10)
        return f"{city}: {len(find_engines())} engine"

    agent = Agent(model="fake", tools=[look_up])

    def work() -> None:
        outcomes.append(agent.run_sync("The weather?"))
        first_has_ended.set()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [(outcome.kind, outcome.text) for outcome in outcomes] == [("final", "It is mild.")] * 2
    assert [outcome.history[2]["output"] for outcome in outcomes] == ["Bern: 1 engine"] * 2
    assert join_engines() == []


@pytest.mark.usefixtures("settings")
async def test_engine_shared_by_loop_and_thread_closes_with_the_last() -> None:
    agent = Agent(model="fake")
    here = (await agent.run("Please count.")).text
    there = (await asyncio.to_thread(agent.run_sync, "Please count.")).text
    assert (here, there, (await agent.run("Please count.")).text) == ("One.", "Two.", "Three.")
    await agent.close()
    assert join_engines() == []


@pytest.mark.usefixtures("settings")
def test_closed_event_loop_does_not_hold_the_engine() -> None:
    agent = Agent(model="fake")
    assert asyncio.run(agent.run("Please count.")).text == "One."
    assert agent.run_sync("Please count.").text == "Two."
    assert join_engines() == []


@pytest.mark.usefixtures("settings")
def test_garbage_collected_agent_closes_its_engine() -> None:
    assert asyncio.run(Agent(model="fake").run("Please count.")).text == "One."
    gc.collect()
    assert join_engines() == []


@pytest.mark.usefixtures("settings")
async def test_closed_stream_stops_the_model_and_the_next_is_answered() -> None:
    transport = InProcessTransport()
    events = await transport.stream({"model": "fake", "input": "Please wait."})
    assert next(event.type for event in await anext(events)) == "response.created"
    await events.aclose()
    again = await transport.stream({"model": "fake", "input": "Please count."})
    assert [event.type async for batch in again for event in batch][-1] == "response.completed"
    await transport.close()


@pytest.mark.usefixtures("settings")
async def test_closing_during_a_request_raises_in_its_reader() -> None:
    transport = InProcessTransport()
    events = await transport.stream({"model": "fake", "input": "Please wait."})
    await transport.close()
    with pytest.raises(Unavailable, match="closed"):
        async for _ in events:
            pass


class SlowEngine:
    """An engine whose start waits for `gate`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_starting = threading.Event()
        self.gate = asyncio.Event()

    async def start(self) -> None:
        self.is_starting.set()
        await self.gate.wait()
        self.calls.append("start")

    async def close(self) -> None:
        self.calls.append("close")


def start_engine(engine: Any) -> EngineThread:
    thread = EngineThread(lambda: engine)
    thread.submit(thread.get_engine())
    assert engine.is_starting.wait(10)
    return thread


def test_closing_during_the_start_closes_the_started_engine() -> None:
    engine = SlowEngine()
    thread = start_engine(engine)
    thread.close()
    thread.loop.call_soon_threadsafe(engine.gate.set)
    thread.closed.result(10)
    assert engine.calls == ["start", "close"]


def test_closing_can_cancel_the_start() -> None:
    engine = SlowEngine()
    thread = start_engine(engine)
    thread.close(cancel_start=True)
    thread.closed.result(10)
    assert (engine.calls, thread.loop.is_closed()) == ([], True)


def test_closing_cancels_submitted_work() -> None:
    thread = EngineThread(SlowEngine)  # type: ignore[arg-type]  # it is never started
    work = thread.submit(asyncio.Event().wait())
    thread.close()
    with pytest.raises(CancelledError):
        work.result(10)
    thread.closed.result(10)


def test_agent_import_loads_no_server_engine_or_http_client() -> None:
    """A small program with an agent must not wait for imports that it does not use."""
    code = "import sys; from antiphon import Agent, tool; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = (
        "httptools",
        "antiphon.upstream.http",
        "uvicorn",
        "jsonschema",
        "cryptography",
        "sqlite3",
        "antiphon.engine",
        "antiphon.backends",
    )
    assert [name for name in loaded if name in heavy] == []
