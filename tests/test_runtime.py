"""Agents without a server: the model of the settings, in this process."""

import asyncio
import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from antiphon import Agent, tool
from antiphon.agent.outcome import Outcome
from antiphon.errors import Unavailable
from antiphon.runtime import InProcess

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
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "antiphon.toml"
    path.write_text(SETTINGS)
    return path


@pytest.mark.usefixtures("settings")
def test_a_run_needs_no_server_and_the_next_one_neither() -> None:
    agent = Agent(model="fake", tools=[look_up])
    assert [agent.run_sync("The weather?").text for _ in range(2)] == ["It is mild."] * 2


@pytest.mark.usefixtures("settings")
async def test_runs_side_by_side_share_one_engine() -> None:
    agent = Agent(model="fake", tools=[look_up])
    outcomes = await asyncio.gather(*(agent.run("The weather?") for _ in range(3)))
    assert [outcome.text for outcome in outcomes] == ["It is mild."] * 3
    await agent.close()
    await agent.close()


async def test_settings_that_are_wrong_are_told_and_can_be_put_right(settings: Path) -> None:
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
async def test_a_model_that_is_not_there_is_told() -> None:
    agent = Agent(model="other")
    outcome = await agent.run("Hello")
    assert outcome.error is not None
    assert outcome.error.code == "model_not_found"
    await agent.close()


def find_engines() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "antiphon-engine"]


def await_end() -> list[threading.Thread]:
    """The engines that do not end, though their threads have had the time to."""
    for thread in find_engines():
        thread.join(10)
    return find_engines()


@pytest.mark.usefixtures("settings")
def test_threads_that_work_at_once_share_one_engine_and_the_first_to_end_leaves_it_to_the_others() -> None:
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
    assert await_end() == []


@pytest.mark.usefixtures("settings")
async def test_an_event_loop_and_a_thread_share_one_engine_until_both_are_done_with_it() -> None:
    agent = Agent(model="fake")
    here = (await agent.run("Please count.")).text
    there = (await asyncio.to_thread(agent.run_sync, "Please count.")).text
    assert (here, there, (await agent.run("Please count.")).text) == ("One.", "Two.", "Three.")
    await agent.close()
    assert await_end() == []


@pytest.mark.usefixtures("settings")
def test_an_event_loop_that_ended_without_a_word_does_not_keep_the_engine() -> None:
    agent = Agent(model="fake")
    assert asyncio.run(agent.run("Please count.")).text == "One."
    assert agent.run_sync("Please count.").text == "Two."
    assert await_end() == []


@pytest.mark.usefixtures("settings")
def test_an_agent_that_is_forgotten_takes_its_engine_with_it() -> None:
    assert asyncio.run(Agent(model="fake").run("Please count.")).text == "One."
    gc.collect()
    assert await_end() == []


@pytest.mark.usefixtures("settings")
async def test_a_stream_that_is_closed_stops_the_model_and_the_next_is_answered() -> None:
    transport = InProcess()
    events = await transport.stream({"model": "fake", "input": "Please wait."})
    assert next(event.type for event in await anext(events)) == "response.created"
    await events.aclose()
    again = await transport.stream({"model": "fake", "input": "Please count."})
    assert [event.type async for batch in again for event in batch][-1] == "response.completed"
    await transport.close()


@pytest.mark.usefixtures("settings")
async def test_closing_while_the_model_is_at_work_is_told_to_who_reads() -> None:
    transport = InProcess()
    events = await transport.stream({"model": "fake", "input": "Please wait."})
    await transport.close()
    with pytest.raises(Unavailable, match="closed"):
        async for _ in events:
            pass


def test_an_agent_is_loaded_without_a_server_a_model_or_an_http_client() -> None:
    """Whoever starts a small tool with it should not wait for what it does not use."""
    code = "import sys; from antiphon import Agent, tool; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = ("aiohttp", "uvicorn", "jsonschema", "cryptography", "sqlite3", "antiphon.engine", "antiphon.backends")
    assert [name for name in loaded if name in heavy] == []
