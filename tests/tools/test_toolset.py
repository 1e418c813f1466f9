"""Sets of tools: combined, filtered, renamed, with approval, and chosen for each turn."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from antiphon import Agent, ConfigError, McpServer, RunContext, Tool, Toolset, WebSearch, computer_tool, tool
from antiphon.testing.scripted import ScriptedTransport

SUPPORT = Path(__file__).parents[1] / "support"


@tool
def get_weather(city: str) -> str:
    """Return the weather."""
    return f"{city}: mild"


@tool
def delete_city(city: str) -> str:
    """Delete a city."""
    return f"{city} is gone"


BOTH = Toolset(get_weather, delete_city)


def script(*calls: tuple[str, dict[str, Any]]) -> ScriptedTransport:
    """Return a model that makes the calls, one in each turn, and then answers."""
    answers: list[Any] = [[{"tool_call": {"name": name, "arguments": arguments}}] for name, arguments in calls]
    return ScriptedTransport({"rules": [{"answers": [*answers, "Done."]}]})


def names_of(request: dict[str, Any]) -> list[str]:
    return [each.get("name") or each["type"] for each in request["tools"]]


def outputs_of(outcome: Any) -> list[str]:
    return [item["output"] for item in outcome.history if "output" in item]


def list_names(toolset: Toolset) -> list[str]:
    return [each.name for each in toolset.list_tools() if isinstance(each, Tool)]


def test_sets_are_combined_filtered_and_renamed() -> None:
    assert list_names(BOTH + tool(name="third", description="Third.")(lambda: 3)) == [
        "get_weather",
        "delete_city",
        "third",
    ]
    assert list_names(BOTH.filter(["delete_city"])) == ["delete_city"]
    assert list_names(BOTH.filter(lambda each: "weather" in each.description)) == ["get_weather"]
    assert list_names(BOTH.rename({"get_weather": "weather"})) == ["weather", "delete_city"]
    assert list_names(Toolset(BOTH.prefix("a_"), BOTH.prefix("b_").filter(["b_get_weather"]))) == [
        "a_get_weather",
        "a_delete_city",
        "b_get_weather",
    ]
    assert list_names(BOTH) == ["get_weather", "delete_city"]


async def test_renamed_tool_of_a_set_is_called() -> None:
    model = script(("home_get_weather", {"city": "Bern"}))
    outcome = await Agent(model="scripted", transport=model, tools=[BOTH.prefix("home_"), delete_city]).run("Go.")
    assert (outcome.kind, outputs_of(outcome)) == ("final", ["Bern: mild"])
    assert names_of(model.requests[0]) == ["home_get_weather", "home_delete_city", "delete_city"]


@pytest.mark.parametrize(
    ("when", "waits"), [(None, True), (lambda given: given["city"] == "Bern", True), (lambda _: False, False)]
)
async def test_calls_of_a_set_need_approval(when: Any, waits: bool) -> None:
    model = script(("delete_city", {"city": "Bern"}))
    tools = Toolset(get_weather, BOTH.filter(["delete_city"]).require_approval(when))
    outcome = await Agent(model="scripted", transport=model, tools=tools).run("Go.")
    assert [each.name for each in outcome.pending] == (["delete_city"] if waits else [])


def test_native_tools_have_fixed_names_and_safety_checks() -> None:
    screen = computer_tool(lambda *_: "https://example.com/a.png")
    (changed,) = Toolset(screen).prefix("x_").require_approval(lambda _: False).list_tools()
    assert isinstance(changed, Tool)
    assert callable(changed.needs_approval)
    assert (changed.name, changed.describe()) == ("computer", {"type": "computer"})
    assert [changed.needs_approval({"safety_checks": checks}) for checks in ([], [{"id": "sc_1"}])] == [False, True]


@dataclass
class User:
    is_admin: bool


async def choose(context: RunContext[User]) -> Sequence[Any]:
    assert context.turn >= 1
    return [BOTH if context.deps.is_admin else BOTH.filter(["get_weather"]), WebSearch()]


@pytest.mark.parametrize(("is_admin", "names"), [(True, ["get_weather", "delete_city"]), (False, ["get_weather"])])
async def test_dynamic_set_depends_on_the_context(is_admin: bool, names: list[str]) -> None:
    fixed = tool(name="fixed", description="Fixed.")(lambda: 1)
    dynamic = Toolset.dynamic(choose).prefix("x_")
    for tools in ([fixed, dynamic], Toolset(fixed, dynamic)):
        model = script(("x_get_weather", {"city": "Bern"}))
        agent = Agent(model="scripted", transport=model, tools=tools, deps_type=User)
        outcome = await agent.run("Go.", deps=User(is_admin))
        expected = ["fixed", *(f"x_{name}" for name in names), "web_search"]
        assert [names_of(request) for request in model.requests] == [expected, expected]
        assert outputs_of(outcome) == ["Bern: mild"]


async def test_function_for_tools_can_return_sets_and_server_tools() -> None:
    model = script(("get_weather", {"city": "Bern"}))
    agent = Agent(model="scripted", transport=model, tools=choose, deps_type=User)
    assert (await agent.run("Go.", deps=User(is_admin=False))).kind == "final"
    assert names_of(model.requests[0]) == ["get_weather", "web_search"]


async def test_sets_of_one_run_are_added() -> None:
    model = script(("delete_city", {"city": "Bern"}))
    agent = Agent(model="scripted", transport=model, tools=[get_weather, WebSearch()])
    other = tool(name="get_weather", description="Mine.")(lambda: 1)
    outcome = await agent.run("Go.", tools=[Toolset(other), Toolset.dynamic(lambda _: [delete_city])])
    assert outputs_of(outcome) == ["Bern is gone"]
    for request in model.requests:
        assert names_of(request) == ["web_search", "get_weather", "delete_city"]
        assert request["tools"][1]["description"] == "Mine."


async def test_mcp_server_is_a_set() -> None:
    pytest.importorskip("mcp")
    server = McpServer.stdio(sys.executable, [str(SUPPORT / "mcp_asking_server.py")])
    model = script(("lab_ask", {"method": "roots/list"}))
    lab = Toolset(server).filter(["ask"]).prefix("lab_")
    agent = Agent(model="scripted", transport=model, tools=[get_weather, lab])
    # The agent is made before the server is connected.
    failed = await agent.run("Go.")
    assert failed.error is not None
    found = (failed.kind, failed.error.code, "use it inside of 'async with'" in failed.error.message)
    assert found == ("failed", "tools_failed", True)
    async with server:
        outcome = await agent.run("Go.")
    assert (outcome.kind, "List roots not supported" in outputs_of(outcome)[0]) == ("final", True)
    assert names_of(model.requests[0]) == ["get_weather", "lab_ask"]


def test_mistakes_are_refused() -> None:
    for make, message in (
        (lambda: Toolset(get_weather, len), "len is not a tool: decorate it with @tool."),
        (lambda: Toolset.dynamic([get_weather]), "dynamic: expected a function, got list."),
        (lambda: BOTH.filter("get_weather"), "filter: expected names of tools or a function, got a string."),
        (lambda: BOTH.filter(["wether"]), "There is no tool 'wether' in the set. It has: get_weather, delete_city."),
        (
            lambda: BOTH.rename({"wether": "x"}),
            "There is no tool 'wether' in the set. It has: get_weather, delete_city.",
        ),
        (
            lambda: BOTH.prefix("not allowed "),
            "Invalid tool name 'not allowed get_weather': use 1 to 64 letters, digits, '_' and '-'.",
        ),
        (
            lambda: Toolset(WebSearch()).require_approval(),
            "require_approval: the server runs the tool 'web_search', so the agent cannot ask for it.",
        ),
        (
            lambda: Agent(model="scripted", transport=script(), tools=[get_weather, BOTH]),
            "There are two tools called 'get_weather'.",
        ),
        (
            lambda: Agent(model="scripted", transport=script(), tools=get_weather),
            "tools: expected a list of tools, got one tool.",
        ),
    ):
        with pytest.raises(ConfigError) as raised:
            make()
        assert raised.value.message == message


async def test_mistake_of_a_dynamic_set_fails_the_run() -> None:
    for made, reason in (
        ([len], "len is not a tool: decorate it with @tool."),
        ([BOTH, get_weather], "There are two tools called 'get_weather'."),
        (7, "tools: expected a list of tools, got int."),
    ):
        tools = Toolset.dynamic(lambda _, made=made: made)  # type: ignore[misc]
        outcome = await Agent(model="scripted", transport=script(), tools=[tools]).run("Go.")
        assert outcome.error is not None
        assert (outcome.kind, outcome.error.code) == ("failed", "tools_failed")
        assert outcome.error.message == f"The tools of the agent 'agent' cannot be made: {reason}"
