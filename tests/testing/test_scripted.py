"""The scripted model for tests of agents, in this process and behind a server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from antiphon import Agent, tool
from antiphon.agent.transports.base import Transport
from antiphon.agent.transports.http import HttpTransport
from antiphon.errors import ConfigError, InvalidRequest, RateLimited
from antiphon.testing.network import forbid_network
from antiphon.testing.scripted import ScriptedTransport, serve_script

CALL = [{"tool_call": {"name": "look_up", "arguments": {"city": "Bern"}, "call_id": "call_1"}}]
SCRIPT: dict[str, Any] = {"rules": [{"answers": [CALL, "It is 10 degrees."]}]}


@tool
def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: 10"


def make_agent(transport: Transport) -> Agent:
    return Agent(model="scripted", transport=transport, tools=[look_up])


async def test_agent_runs_on_a_script_without_a_socket() -> None:
    transport = ScriptedTransport(SCRIPT)
    with forbid_network(loopback=False):
        outcome = await make_agent(transport).run("How is the weather in Bern?")
    await transport.close()
    assert (outcome.kind, outcome.text, outcome.tool_calls) == ("final", "It is 10 degrees.", 1)
    assert [request["input"][-1] for request in transport.requests] == [
        {"role": "user", "content": "How is the weather in Bern?"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Bern: 10"},
    ]


async def test_gate_holds_an_answer() -> None:
    transport = ScriptedTransport({"default": [{"text": "Before "}, {"wait": "gate"}, {"text": "after"}]})
    running = asyncio.create_task(make_agent(transport).run("Go."))
    await transport.backend.reached("gate")
    assert not running.done()
    transport.backend.release("gate")
    assert (await running).text == "Before after"
    await transport.close()


async def test_scripted_errors_are_raised_by_the_transport() -> None:
    error = {"message": "Slow down.", "status": 429, "type": "rate_limit_error", "code": "rate_limit_exceeded"}
    transport = ScriptedTransport({"default": [{"raise": error}]})
    with pytest.raises(RateLimited, match="Slow down"):
        await transport.stream({"model": "scripted", "input": "hi"})
    with pytest.raises(InvalidRequest) as caught:
        await transport.stream({"model": "another", "input": "hi"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    await transport.close()


def test_one_transport_serves_several_runs() -> None:
    transport = ScriptedTransport({"rules": [{"answers": ["One.", "Two.", "Three."]}]})
    agent = make_agent(transport)
    assert [agent.run_sync("Count.").text for _ in range(3)] == ["One.", "Two.", "Three."]


async def test_script_file_is_read_and_errors_are_named(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps({"default": "From a file."}))
    transport = ScriptedTransport(tmp_path / "script.json")
    assert (await make_agent(transport).run("Go.")).text == "From a file."
    await transport.close()
    with pytest.raises(ConfigError, match=r"script\.rules\[0\]"):
        ScriptedTransport({"rules": [{"answers": 1}]})


async def test_served_script_works_for_agents_and_sdk() -> None:
    with serve_script(SCRIPT) as server, forbid_network():
        transport = HttpTransport(server.base_url)
        outcome = await make_agent(transport).run("How is the weather in Bern?")
        await transport.close()
        assert (outcome.kind, outcome.text) == ("final", "It is 10 degrees.")
        with OpenAI(base_url=server.base_url, api_key="any", max_retries=0) as client:
            answer = await asyncio.to_thread(client.responses.create, model="scripted", input="And now?")
        assert answer.output_text == "It is 10 degrees."


def test_served_scripts_are_independent() -> None:
    with serve_script({"default": "One."}) as one, serve_script({"default": "Two."}) as two:
        assert one.url != two.url
        agents = [Agent(model="scripted", base_url=server.base_url) for server in (one, two)]
        assert [agent.run_sync("Who?").text for agent in agents] == ["One.", "Two."]
