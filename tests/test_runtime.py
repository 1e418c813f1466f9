"""Agents without a server: the model of the settings, in this process."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon import Agent, tool

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


def test_an_agent_is_loaded_without_a_server_a_model_or_an_http_client() -> None:
    """Whoever starts a small tool with it should not wait for what it does not use."""
    code = "import sys; from antiphon import Agent, tool; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = ("aiohttp", "uvicorn", "jsonschema", "cryptography", "sqlite3", "antiphon.engine", "antiphon.backends")
    assert [name for name in loaded if name in heavy] == []
