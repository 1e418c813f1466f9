"""Names and choices of hosted functions, and tool searches over them."""

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest

from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.hosted import McpCall
from antiphon.protocol.tools import McpTool, Tool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import CloseItem, Delta, OpenItem
from antiphon.tools.hosted.base import HostedCall, HostedContext, HostedFunction, HostedSession, HostedTool
from support.hosted_harness import (
    FILE_SEARCH,
    WEATHER,
    make_call,
    make_script,
    make_search,
    make_text,
    run_engine,
    show_items,
)
from support.hosted_tool import RecordingTool


class NotesTool(HostedTool):
    """An MCP server in the process, with two functions."""

    types = frozenset({"mcp"})

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        assert isinstance(tool, McpTool)
        return NotesSession(tool.server_label)


class NotesSession(HostedSession):
    functions = tuple(
        HostedFunction(name=name, description=description, parameters={"type": "object", "properties": {}})
        for name, description in (("read_note", "Read one note."), ("send_mail", "Send a letter to somebody."))
    )

    def __init__(self, label: str) -> None:
        self.label = label

    def begin(self, name: str, key: str) -> HostedCall:
        return NotesCall(self.label, name, key)


class NotesCall(HostedCall):
    def __init__(self, label: str, name: str, key: str) -> None:
        self._item = McpCall("{}", name, label, output=f"{name} done", status="completed")
        self._key = key

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        started = msgspec.structs.replace(self._item, output=None, status="in_progress")
        yield [OpenItem(self._key, started, "mcp"), CloseItem(self._key, self._item)]


async def test_tool_search_loads_deferred_mcp_tools() -> None:
    mcp = {"type": "mcp", "server_label": "notes", "defer_loading": True, "server_description": "The notes."}
    search = {"tool_call": {"name": "tool_search", "arguments": {"query": "letter"}}}
    answers = make_script(
        [search], [{"tool_call": {"name": "notes__send_mail", "arguments": {}, "call_id": "call_m"}}], "Sent."
    )
    async with run_engine(answers, NotesTool()) as harness:
        response = await harness.answer(tools=[{"type": "tool_search"}, mcp])
        first, second, third = harness.turns
    assert [item.type for item in response.output] == ["tool_search_call", "tool_search_output", "mcp_call", "message"]
    searched, loaded, called = json.loads(codec.encode(response.output[:3]))
    assert (searched["call_id"], searched["execution"], loaded["call_id"]) == (None, "server", None)
    assert [(each["type"], each["name"], [tool["name"] for tool in each["tools"]]) for each in loaded["tools"]] == [
        ("namespace", "notes", ["send_mail"])
    ]
    assert (called["server_label"], called["name"], called["output"]) == ("notes", "send_mail", "send_mail done")
    assert [tool.name for tool in first.request.tools] == ["tool_search"]
    assert [tool.name for tool in second.request.tools] == ["tool_search", "notes__send_mail"]
    assert [(item.type, getattr(item, "name", None)) for item in third.items[-2:]] == [
        ("function_call", "notes__send_mail"),
        ("function_call_output", None),
    ]


async def test_two_servers_with_one_tool_name_get_their_labels_as_prefix() -> None:
    servers = [{"type": "mcp", "server_label": label} for label in ("a", "b")]
    answers = make_script([{"tool_call": {"name": "b__read_note", "arguments": {}}}], "Read.")
    async with run_engine(answers, NotesTool()) as harness:
        response = await harness.answer(tools=servers)
        names = [tool.name for tool in harness.turns[0].request.tools]
        await harness.answer("more", tools=servers[1:], previous_response_id=response.id)
        continued = harness.turns[-1].items
    assert names == ["a__read_note", "a__send_mail", "b__read_note", "b__send_mail"]
    assert (response.output[0].server_label, response.output[0].name) == ("b", "read_note")
    assert continued[1].name == "read_note"


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ({"type": "mcp", "server_label": "b"}, ["b__read_note", "b__send_mail"]),
        ({"type": "mcp", "server_label": "b", "name": "read_note"}, ["b__read_note"]),
    ],
)
async def test_choice_of_an_mcp_server_allows_its_functions(choice: dict[str, Any], allowed: list[str]) -> None:
    servers = [{"type": "mcp", "server_label": label} for label in ("a", "b")]
    denied = {"tool_call": {"name": "a__read_note", "arguments": {}, "key": 1}}
    wanted = {"tool_call": {"name": "b__read_note", "arguments": {}, "key": 2}}
    async with run_engine(make_script([denied, wanted], "Read."), NotesTool()) as harness:
        response = await harness.answer(tools=servers, tool_choice=choice)
    assert [getattr(item, "server_label", None) for item in response.output] == ["b", None]
    assert {tool.name for tool in harness.turns[0].request.tools} >= set(allowed)


async def test_two_entries_of_one_tool_have_different_names() -> None:
    answers = make_script([make_call("cats", name="hosted_1__file_search")], "Done.")
    async with run_engine(answers, RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH, FILE_SEARCH])
        names = [tool.name for tool in harness.turns[0].request.tools]
    assert names == ["hosted__file_search", "hosted_1__file_search"]
    assert show_items(response.output) == [make_search("cats"), make_text("Done.")]


async def test_choice_none_calls_no_hosted_tool() -> None:
    tool = RecordingTool()
    async with run_engine(make_script([{"text": "No."}, make_call("cats")]), tool) as harness:
        response = await harness.answer(tools=[FILE_SEARCH], tool_choice="none")
    assert (show_items(response.output), tool.effects) == ([make_text("No.")], [])


async def test_call_without_arguments_gets_an_empty_object() -> None:
    server = {"type": "mcp", "server_label": "a"}
    async with run_engine(make_script([{"tool_call": {"name": "read_note"}}], "Read."), NotesTool()) as harness:
        response = await harness.answer(tools=[server])
        called = harness.turns[-1].items[1]
    assert [item.type for item in response.output] == ["mcp_call", "message"]
    assert called.arguments == "{}"


async def test_tokens_of_a_request_with_hosted_tools_are_counted() -> None:
    async with run_engine(make_script("Never."), RecordingTool()) as harness:
        body = codec.encode({"model": "scripted", "input": "one two three", "tools": [FILE_SEARCH]})
        counted, _ = await harness.engine.count_input_tokens(codec.decode_request(body).body, project="default")
    assert counted >= 3


@pytest.mark.parametrize(
    ("kind", "fields", "choice"),
    [
        ("file_search", {"vector_store_ids": ["vs_1"]}, "file_search"),
        ("code_interpreter", {"container": {"type": "auto"}}, "code_interpreter"),
        ("image_generation", {}, "image_generation"),
        ("web_search", {}, "web_search"),
        ("web_search", {}, "web_search_preview"),
        ("web_search", {}, "web_search_preview_2025_03_11"),
    ],
)
async def test_choice_of_a_hosted_type_requires_its_function(kind: Any, fields: Any, choice: str) -> None:
    answers = make_script([make_call("cats", name=kind)], "Done.")
    async with run_engine(answers, RecordingTool(kind)) as harness:
        response = await harness.answer(tools=[{"type": kind} | fields, WEATHER], tool_choice={"type": choice})
        first, second = harness.turns
    assert json.loads(codec.encode(first.request.tool_choice)) == {"type": "function", "name": kind}
    assert second.request.tool_choice in (None, "auto")
    assert (response.status, response.output_text) == ("completed", "Done.")


async def test_choice_of_an_absent_mcp_server_is_refused() -> None:
    async with run_engine(make_script("Never."), NotesTool()) as harness:
        with pytest.raises(InvalidRequest) as caught:
            await harness.ask(
                tools=[{"type": "mcp", "server_label": "a"}], tool_choice={"type": "mcp", "server_label": "b"}
            )
    assert caught.value.param == "tool_choice.server_label"


@pytest.mark.parametrize(("name", "shown"), [("find_files", "find_files"), ("find files!", "unknown")])
async def test_call_of_a_tool_that_does_not_exist_is_refused_to_the_model(name: str, shown: str) -> None:
    tool = RecordingTool()
    answers = make_script([make_call("cats", name=name)], [make_call("cats", call_id="call_2")], "Done.")
    async with run_engine(answers, tool) as harness:
        response = await harness.answer(tools=[FILE_SEARCH, WEATHER])
        called, refused = harness.turns[1].items[-2:]
    assert show_items(response.output) == [make_search("cats"), make_text("Done.")]
    assert (called.name, refused.output) == (shown, "The call was not carried out: there is no tool of this name.")


async def test_tool_that_an_item_defines_is_called_by_the_client() -> None:
    defined = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    answers = make_script([{"tool_call": {"name": "get_weather", "arguments": {}}}])
    async with run_engine(answers, RecordingTool()) as harness:
        response = await harness.answer([defined, {"role": "user", "content": "hi"}], tools=[FILE_SEARCH])
    assert [(item.type, item.name) for item in response.output] == [("function_call", "get_weather")]
