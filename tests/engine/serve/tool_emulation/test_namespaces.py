"""Namespaces on a model that only knows functions."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.serve.tool_emulation.catalog import Catalog, ToolKey
from antiphon.engine.serve.tool_emulation.translate_history import translate_items
from antiphon.protocol.items import CustomToolCall, FunctionCall
from antiphon.protocol.tools import CustomTool, FunctionTool, NamespaceTool
from support.tool_emulation import call

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


async def test_a_call_comes_back_with_its_namespace(emulate: Any) -> None:
    bench = await emulate(call("crm__get", {}), call("crm__put", {"input": "x"}, "call_2"))
    answer = await bench.ask(tools=[CRM])
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


async def test_a_model_that_leaves_the_namespace_away_is_understood(emulate: Any) -> None:
    bench = await emulate(call("get", {}))
    assert (await bench.ask(tools=[CRM])).output == [getting()]


async def test_what_a_namespace_says_of_itself_its_first_tool_says(emulate: Any) -> None:
    bench = await emulate({"text": "Ok."})
    answer = await bench.ask(tools=[CRM])
    assert [tool.description for tool in answer.turns[0].request.tools] == [
        "All tools of crm: Customers.",
        "Put the whole text for this tool into 'input'.",
    ]


async def test_a_bare_name_that_two_namespaces_have_stays_as_it_is(emulate: Any) -> None:
    bench = await emulate(call("get", {}))
    (called,) = (await bench.ask(tools=[CRM, CRM | {"name": "erp"}])).output
    assert (called["name"], called.get("namespace")) == ("get", None)


async def test_a_function_of_the_same_name_comes_before_a_child(emulate: Any) -> None:
    bench = await emulate(call("get", {}), call("crm__get", {}, "call_2"))
    output = (await bench.ask(tools=[CRM, GET])).output
    assert [(item["name"], item.get("namespace")) for item in output] == [("get", None), ("get", "crm")]


async def test_earlier_calls_are_read_by_the_same_name(emulate: Any) -> None:
    bench = await emulate({"text": "Ok."})
    output = {"type": "function_call_output", "call_id": "call_1", "output": "ada"}
    answer = await bench.ask([{"role": "user", "content": "?"}, getting(), output], tools=[CRM])
    assert (answer.read[1]["name"], answer.read[1].get("namespace")) == ("crm__get", None)


words = st.text("ab_.é", min_size=1, max_size=70)
children = st.lists(st.tuples(st.none() | words, words, st.booleans()), unique_by=lambda each: each[:2], max_size=8)


@given(children)
def test_any_names_go_there_and_back(tools: list[tuple[str | None, str, bool]]) -> None:
    offered = [
        tool if namespace is None else NamespaceTool(namespace, "", [tool])
        for namespace, name, custom in tools
        for tool in [CustomTool(name) if custom else FunctionTool(name)]
    ]
    catalog = Catalog(offered, [], frozenset({"function"}))
    for namespace, name, custom in tools:
        called = (CustomToolCall if custom else FunctionCall)("c", name, "{}", namespace=namespace)
        (lowered,) = translate_items([called], catalog, custom=False, images=False)
        assert isinstance(lowered, FunctionCall)
        entry = catalog.find(lowered.name)
        assert entry is not None
        assert entry.key == ToolKey("named", namespace, name)
