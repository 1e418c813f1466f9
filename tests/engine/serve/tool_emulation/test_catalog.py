"""The tool catalog: names for the backend, and namespaces in responses."""

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.serve.tool_emulation.catalog import Catalog, ToolKey, ToolNames
from antiphon.engine.serve.tool_emulation.translate_history import translate_items
from antiphon.protocol.items import CustomToolCall, FunctionCall
from antiphon.protocol.tools import CustomTool, FunctionTool, NamespaceTool
from support.tool_emulation import call

# Names


texts = st.text("ab_.-é ", min_size=1, max_size=80)
identities = st.builds(ToolKey, st.just("named"), st.none() | texts, texts) | st.builds(
    ToolKey, st.sampled_from(["shell", "computer", "tool_search"])
)


def test_namespaced_tool_name_has_both_names() -> None:
    assert ToolNames().get_or_assign(ToolKey("named", "crm", "get")) == "crm__get"


def test_unnamed_tool_is_named_by_its_type() -> None:
    assert ToolNames().get_or_assign(ToolKey("shell")) == "shell"


def test_function_has_priority_for_its_name() -> None:
    names = ToolNames()
    names.reserve(ToolKey("named", None, "crm__get"))
    names.reserve(ToolKey("named", None, "shell"))
    given_names = [names.get_or_assign(ToolKey("named", "crm", "get")), names.get_or_assign(ToolKey("shell"))]
    assert [re.sub("[0-9a-f]{8}$", "*", name) for name in given_names] == ["crm__get_*", "shell_*"]


def test_equal_joined_names_get_different_names() -> None:
    names = ToolNames()
    first = names.get_or_assign(ToolKey("named", "a", "b__c"))
    second = names.get_or_assign(ToolKey("named", "a__b", "c"))
    assert first == "a__b__c" != second


@given(st.lists(identities, unique=True, max_size=12))
def test_names_are_legal_unique_and_stable(tools: list[ToolKey]) -> None:
    names, again = ToolNames(), ToolNames()
    given_names = [names.get_or_assign(tool) for tool in tools]
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", name) for name in given_names)
    assert len(set(given_names)) == len(tools)
    assert [names.get_or_assign(tool) for tool in tools] == given_names == [again.get_or_assign(tool) for tool in tools]


# Namespaces in responses


GET = {"type": "function", "name": "get", "parameters": {"type": "object"}}
CRM = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [GET, {"type": "custom", "name": "put"}],
}


def getting(**changes: Any) -> dict[str, Any]:
    item = {"type": "function_call", "call_id": "call_1", "name": "get", "arguments": "{}", "status": "completed"}
    return item | {"namespace": "crm"} | changes


async def test_call_is_emitted_with_its_namespace(emulate: Any) -> None:
    harness = await emulate(call("crm__get", {}), call("crm__put", {"input": "x"}, "call_2"))
    answer = await harness.ask(tools=[CRM])
    assert answer.output == [
        getting(),
        {
            "type": "custom_tool_call",
            "call_id": "call_2",
            "name": "put",
            "input": "x",
            "namespace": "crm",
            "status": "completed",
        },
    ]
    assert answer.shown == ["crm__get", "crm__put"]
    assert answer.get_events("output_item.added")[0]["item"]["namespace"] == "crm"


async def test_call_without_the_namespace_is_resolved(emulate: Any) -> None:
    harness = await emulate(call("get", {}))
    assert (await harness.ask(tools=[CRM])).output == [getting()]


async def test_namespace_description_is_added_to_its_first_tool(emulate: Any) -> None:
    harness = await emulate({"text": "Ok."})
    answer = await harness.ask(tools=[CRM])
    assert [tool.description for tool in answer.turns[0].request.tools] == [
        "All tools of crm: Customers.",
        "Put the whole text for this tool into 'input'.",
    ]


async def test_ambiguous_name_without_namespace_stays_unchanged(emulate: Any) -> None:
    harness = await emulate(call("get", {}))
    (called,) = (await harness.ask(tools=[CRM, CRM | {"name": "erp"}])).output
    assert (called["name"], called.get("namespace")) == ("get", None)


async def test_function_is_found_before_a_namespaced_tool(emulate: Any) -> None:
    harness = await emulate(call("get", {}), call("crm__get", {}, "call_2"))
    output = (await harness.ask(tools=[CRM, GET])).output
    assert [(item["name"], item.get("namespace")) for item in output] == [("get", None), ("get", "crm")]


async def test_history_calls_have_the_same_backend_name(emulate: Any) -> None:
    harness = await emulate({"text": "Ok."})
    output = {"type": "function_call_output", "call_id": "call_1", "output": "ada"}
    answer = await harness.ask([{"role": "user", "content": "?"}, getting(), output], tools=[CRM])
    assert (answer.read[1]["name"], answer.read[1].get("namespace")) == ("crm__get", None)


words = st.text("ab_.é", min_size=1, max_size=70)
children = st.lists(st.tuples(st.none() | words, words, st.booleans()), unique_by=lambda each: each[:2], max_size=8)


@given(children)
def test_any_names_survive_the_round_trip(tools: list[tuple[str | None, str, bool]]) -> None:
    offered = [
        tool if namespace is None else NamespaceTool(namespace, "", [tool])
        for namespace, name, custom in tools
        for tool in [CustomTool(name) if custom else FunctionTool(name)]
    ]
    catalog = Catalog(offered, [], frozenset({"function"}))
    for namespace, name, custom in tools:
        called = (CustomToolCall if custom else FunctionCall)("c", name, "{}", namespace=namespace)
        (translated,) = translate_items([called], catalog, custom=False, images=False)
        assert isinstance(translated, FunctionCall)
        entry = catalog.find(translated.name)
        assert entry is not None
        assert entry.key == ToolKey("named", namespace, name)
