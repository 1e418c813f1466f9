"""Tool search: the search by words, deferred tools in responses, and tools in input items."""

from typing import Any

import pytest

from antiphon.engine.serve.tool_emulation.catalog import Catalog
from antiphon.engine.serve.tool_emulation.tool_search import MAX_FOUND, group_by_namespace, search_tools
from antiphon.protocol.tools import FunctionTool, NamespaceTool, Tool, ToolSearchTool
from antiphon.protocol.unions import Unknown
from support.tool_emulation import call

# The search


def deferred(name: str, description: str = "") -> FunctionTool:
    return FunctionTool(name, description, defer_loading=True)


MAIL_TOOL = NamespaceTool("mail", "Everything about letters", [deferred("send_mail"), deferred("list_folders")])
WEATHER_TOOL = deferred("get_weather", "The weather of a city today")
STOCKS = deferred("get_stock", "The price of a share today")


def find(query: str, *tools: Tool | Unknown) -> list[Tool | Unknown]:
    return group_by_namespace(
        search_tools({"query": query}, Catalog([ToolSearchTool(), *tools], [], frozenset({"function"})).list_deferred())
    )


def test_best_match_comes_first_and_others_are_omitted() -> None:
    assert find("weather today", STOCKS, MAIL_TOOL, WEATHER_TOOL) == [WEATHER_TOOL, STOCKS]


def test_namespace_words_match_and_results_are_grouped() -> None:
    assert find("letters", WEATHER_TOOL, MAIL_TOOL) == [MAIL_TOOL]
    assert find("folder", WEATHER_TOOL, MAIL_TOOL) == [
        NamespaceTool("mail", MAIL_TOOL.description, [deferred("list_folders")])
    ]


def test_search_returns_only_the_best_matches() -> None:
    assert len(find("thing", *(deferred(f"thing_{index}") for index in range(9)))) == MAX_FOUND


def test_search_without_a_match_returns_nothing() -> None:
    assert find("rocket", WEATHER_TOOL, STOCKS) == []


# Responses


SEARCH = {"type": "tool_search"}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object"},
    "strict": None,
    "defer_loading": True,
}
MAIL = {
    "type": "namespace",
    "name": "mail",
    "description": "Letters",
    "tools": [WEATHER | {"name": "send", "description": "Send a letter"}],
}
LOOK = call("tool_search", {"query": "weather in Bern"}, "call_0")


def searched(paths: list[str], *tools: Any) -> list[dict[str, Any]]:
    location = {"call_id": None, "execution": "server", "status": "completed"}
    return [
        {"type": "tool_search_call", "arguments": {"paths": paths}, **location},
        {"type": "tool_search_output", "tools": list(tools), **location},
    ]


async def test_server_search_loads_tools_and_calls_the_model_again(emulate: Any) -> None:
    rules = [{"text": "can be called now: get_weather", "answers": [[call("get_weather", {"city": "Bern"})]]}]
    harness = await emulate({"text": "Let me see."}, LOOK, rules=rules)
    answer = await harness.ask(tools=[SEARCH, WEATHER, MAIL])
    message, *search, called = answer.output
    assert (message["type"], search, called["name"]) == (
        "message",
        searched(["get_weather"], WEATHER),
        "get_weather",
    )
    assert [[tool.name for tool in turn.request.tools or ()] for turn in answer.turns] == [
        ["tool_search"],
        ["tool_search", "get_weather"],
    ]
    assert [item["type"] for item in answer.read] == ["message", "message", "function_call", "function_call_output"]
    about = answer.turns[0].request.tools[0].description
    assert ("- get_weather: The weather of a city" in about, "- mail: Letters" in about) == (True, True)


async def test_found_tools_stay_loaded_in_the_next_turn(emulate: Any) -> None:
    rules = [
        {"last_item": "function_call_output", "text": "mild", "answers": ["It is mild."]},
        {"text": "can be called now", "answers": [[call("get_weather", {})]]},
    ]
    harness = await emulate(LOOK, rules=rules)
    first = await harness.ask(tools=[SEARCH, WEATHER, MAIL])
    output = {"type": "function_call_output", "call_id": "call_1", "output": "mild"}
    second = await harness.ask([output], previous_response_id=first.response["id"])
    assert second.shown == ["tool_search", "get_weather"]
    assert [item.get("call_id") for item in second.read[1:3]] == ["call_search_1", "call_search_1"]


async def test_client_call_beside_a_search_ends_the_turn(emulate: Any) -> None:
    harness = await emulate(LOOK, call("f", {}))
    answer = await harness.ask(tools=[SEARCH, WEATHER, {"type": "function", "name": "f"}])
    assert [item["type"] for item in answer.output] == ["function_call", "tool_search_call", "tool_search_output"]
    assert len(answer.turns) == 1


async def test_found_namespace_is_the_path_of_a_search(emulate: Any) -> None:
    rules = [{"text": "can be called now: mail__send", "answers": ["Ok."]}]
    harness = await emulate(call("tool_search", {"query": "letters"}), rules=rules)
    answer = await harness.ask(tools=[SEARCH, WEATHER, MAIL])
    assert answer.output[:-1] == searched(["mail"], MAIL)


@pytest.mark.parametrize(
    ("search_id", "output_id"), [("tsc_1", None), (None, "tsc_1"), ("tsc_1", "tsc_1"), ("tsc_1", "tso_1")]
)
async def test_call_id_of_a_server_search_has_no_effect(
    emulate: Any, search_id: str | None, output_id: str | None
) -> None:
    harness = await emulate({"text": "Ok."})
    search, found = searched(["get_weather"], WEATHER)
    history = [
        {"role": "user", "content": "hello"},
        search | {"id": "tsc_1", "call_id": search_id},
        found | {"id": "tso_1", "call_id": output_id},
    ]
    answer = await harness.ask(history, tools=[SEARCH, WEATHER, MAIL])
    assert [item.get("call_id") for item in answer.read] == [None, "call_search_1", "call_search_1"]
    assert answer.shown == ["tool_search", "get_weather"]


async def test_server_search_with_a_call_id_needs_no_output(emulate: Any) -> None:
    harness = await emulate({"text": "Ok."})
    search, _ = searched(["get_weather"], WEATHER)
    history = [
        {"role": "user", "content": "hello"},
        search | {"id": "tsc_1", "call_id": "tsc_1"},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "mild"},
    ]
    answer = await harness.ask(history, tools=[SEARCH, WEATHER])
    assert [item["type"] for item in answer.read] == ["message", "function_call", "function_call_output"]
    assert answer.warnings[0] == "history: the tool search tsc_1 had no output and was left out"


async def test_lone_search_in_the_history_is_dropped(emulate: Any) -> None:
    harness = await emulate({"text": "Ok."})
    search, found = searched(["get_weather"], WEATHER)
    hello = {"role": "user", "content": "hello"}
    lone_output = await harness.ask([found | {"id": "tso_1"}, hello], tools=[SEARCH, WEATHER])
    lone_search = await harness.ask([search | {"id": "tsc_1"}, hello], tools=[SEARCH, WEATHER])
    assert [[item["type"] for item in answer.read] for answer in (lone_output, lone_search)] == [["message"]] * 2
    assert [answer.warnings[0] for answer in (lone_output, lone_search)] == [
        "history: the output tso_1 without its tool search was left out",
        "history: the tool search tsc_1 had no output and was left out",
    ]


async def test_max_tool_calls_limits_searches(emulate: Any) -> None:
    rules = [
        {"text": "No more searches", "answers": ["I give up."]},
        {"text": "No tools were found", "answers": [[call("tool_search", {"query": "letter"}, "call_2")]]},
    ]
    harness = await emulate(call("tool_search", {"query": "rocket"}), rules=rules)
    answer = await harness.ask(tools=[SEARCH, WEATHER, MAIL], max_tool_calls=1)
    assert answer.output[:-1] == searched(["rocket"])
    assert (answer.output[-1]["content"][0]["text"], len(answer.turns)) == ("I give up.", 3)


async def test_endless_searching_ends_the_response(emulate: Any) -> None:
    harness = await emulate(call("tool_search", {"query": "rocket"}))
    answer = await harness.ask(tools=[SEARCH, WEATHER], max_tool_calls=2)
    assert (answer.response["status"], answer.output, len(answer.turns)) == (
        "completed",
        searched(["rocket"]) * 2,
        4,
    )


async def test_deferred_tools_are_sent_without_a_search_tool(emulate: Any) -> None:
    harness = await emulate({"text": "Ok."})
    assert (await harness.ask(tools=[WEATHER, MAIL])).shown == ["get_weather", "mail__send"]


async def test_required_deferred_tool_is_sent(emulate: Any) -> None:
    harness = await emulate(call("get_weather", {}))
    answer = await harness.ask(tools=[SEARCH, WEATHER, MAIL], tool_choice={"type": "function", "name": "get_weather"})
    assert answer.shown == ["tool_search", "get_weather"]


@pytest.mark.parametrize(
    ("allowed", "shown"),
    [([WEATHER], ["get_weather"]), ([WEATHER, SEARCH], ["tool_search"]), ([MAIL], ["mail__send"])],
)
async def test_allowed_tool_is_deferred_only_if_search_is_allowed(
    emulate: Any, allowed: list[Any], shown: list[str]
) -> None:
    harness = await emulate({"refusal": "No."})
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    assert (await harness.ask(tools=[SEARCH, WEATHER, MAIL], tool_choice=choice)).shown == shown


async def test_search_satisfies_a_required_call(emulate: Any) -> None:
    harness = await emulate(
        call("tool_search", {"query": "rocket"}), rules=[{"text": "No tools", "answers": ["None."]}]
    )
    answer = await harness.ask(tools=[SEARCH, WEATHER], tool_choice="required")
    assert (answer.response["status"], [item["type"] for item in answer.output]) == (
        "completed",
        ["tool_search_call", "tool_search_output", "message"],
    )


CLIENT_SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Ask me.",
    "parameters": {"type": "object", "properties": {"goal": {"type": "string"}}},
}


async def test_tools_found_by_the_client_can_be_called(emulate: Any) -> None:
    rules = [{"text": "can be called now: get_weather, mail__send", "answers": [[call("mail__send", {})]]}]
    harness = await emulate(call("tool_search", {"goal": "write"}), rules=rules)
    first = await harness.ask(tools=[CLIENT_SEARCH])
    (search,) = first.output
    assert search == {
        "type": "tool_search_call",
        "call_id": "call_1",
        "execution": "client",
        "status": "completed",
        "arguments": {"goal": "write"},
    }
    assert (first.turns[0].request.tools[0].description, first.turns[0].request.tools[0].parameters) == (
        "Ask me.",
        CLIENT_SEARCH["parameters"],
    )
    found = {"type": "tool_search_output", "call_id": "call_1", "execution": "client", "tools": [WEATHER, MAIL]}
    second = await harness.ask([found], previous_response_id=first.response["id"])
    assert (second.output[0]["namespace"], second.output[0]["name"]) == ("mail", "send")
    assert second.shown == ["tool_search", "get_weather", "mail__send"]
    assert second.warnings == ["tools: emulated by functions: tool_search"]


async def test_tools_in_input_items_can_be_called(emulate: Any) -> None:
    harness = await emulate(call("crm__draw", {"input": "x"}))
    custom = {"type": "custom", "name": "draw"}
    namespace = {"type": "namespace", "name": "crm", "description": "d", "tools": [custom]}
    brought = {"type": "additional_tools", "role": "developer", "tools": [namespace]}
    answer = await harness.ask([brought, {"role": "user", "content": "draw"}])
    assert answer.output == [
        {
            "type": "custom_tool_call",
            "call_id": "call_1",
            "name": "draw",
            "namespace": "crm",
            "input": "x",
            "status": "completed",
        }
    ]
    assert (answer.shown, [item["type"] for item in answer.read]) == (["crm__draw"], ["message"])
    again = await harness.ask(
        [{"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}],
        previous_response_id=answer.response["id"],
    )
    assert again.shown == ["crm__draw"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
async def test_tools_of_earlier_items_can_be_chosen(emulate: Any, choice: Any) -> None:
    harness = await emulate({"text": "Ok."}, rules=[{"user": "now", "answers": [[call("f", {})]]}])
    function = {"type": "function", "name": "f"}
    brought = {"type": "additional_tools", "role": "developer", "tools": [function]}
    first = await harness.ask([brought, {"role": "user", "content": "later"}])
    second = await harness.ask("now", previous_response_id=first.response["id"], tool_choice=choice)
    assert (second.shown, [item["name"] for item in second.output]) == (["f"], ["f"])


async def test_found_function_has_its_name_as_namespace(emulate: Any) -> None:
    rules = [
        {"text": "mild", "answers": ["It is mild."]},
        {"text": "can be called now", "answers": [[call("get_weather", {})]]},
    ]
    harness = await emulate(LOOK, rules=rules)
    first = await harness.ask(tools=[SEARCH, WEATHER])
    called = first.output[-1]
    assert (called["name"], called["namespace"]) == ("get_weather", "get_weather")
    output = {"type": "function_call_output", "call_id": "call_1", "output": "mild"}
    second = await harness.ask([output], previous_response_id=first.response["id"])
    assert [item["name"] for item in second.read if item["type"] == "function_call"] == ["tool_search", "get_weather"]
