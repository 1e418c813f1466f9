"""The hosted tool `mcp` over HTTP: the official client, an MCP server on a socket, and a model with functions only."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("mcp")

from openai import APIStatusError, BadRequestError
from openai.lib.responses_tool_runner import ResponsesToolRunner

from antiphon.tools.hosted.base import HostedSetup
from antiphon.tools.hosted.mcp.tool import McpHostedTool
from antiphon.tools.hosted.registry import HostedTools
from support.live_server import LiveServer, make_settings
from support.mcp_wire_server import WireServer, serve_mcp
from support.threads import run_in_thread

SECRET = "secret-token-123"
SETTINGS = make_settings(outbound_allow=("127.0.0.1",))


def add(arguments: dict[str, Any]) -> str:
    return str(arguments["one"] + arguments["other"])


def call(name: str, call_id: str = "call_1") -> dict[str, Any]:
    fragments = ['{"one": 2', ', "other": 3}']
    return {"tool_call": {"name": name, "arguments": fragments, "call_id": call_id}}


SCRIPT = {
    "native_tools": ["function"],
    "rules": [
        {"last_item": "function_call_output", "text": "did not approve", "answers": ["As you wish."]},
        {"last_item": "function_call_output", "text": "limit of 1 tool calls", "answers": ["No more."]},
        {"last_item": "function_call_output", "user": "more", "answers": [[call("log", "call_2")]]},
        {"last_item": "function_call_output", "answers": ["The sum is known."]},
        {"user": "twice", "answers": [[call("add"), call("log", "call_2")]]},
        {"user": "prefixed", "answers": [[call("s__add")]]},
        {"answers": [[call("add")]]},
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    tools = HostedTools([McpHostedTool(HostedSetup(settings=SETTINGS))])
    live = LiveServer(SCRIPT, SETTINGS, hosted_tools=tools)
    yield live
    live.stop()


@pytest.fixture
def mcp() -> Iterator[WireServer]:
    with run_in_thread(serve_mcp({"add": add, "log": lambda _: "logged"})) as wire:
        yield wire


def entry(mcp: WireServer, **fields: Any) -> Any:
    return {"type": "mcp", "server_label": "s", "server_url": mcp.url, "require_approval": "never"} | fields


def test_streamed_response_calls_the_server(server: LiveServer, mcp: WireServer) -> None:
    with server.client().responses.stream(model="scripted", input="hi", tools=[entry(mcp)]) as stream:
        types = [event.type.removeprefix("response.") for event in stream]
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert response.output_text == "The sum is known."
    assert (response.output[1].output, response.output[1].arguments) == ("5", '{"one": 2, "other": 3}')
    assert types[2:15] == [
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
    ]
    assert mcp.calls == [("add", {"one": 2, "other": 3})]


def test_execute_endpoint_calls_the_server(server: LiveServer, mcp: WireServer) -> None:
    """The item of the call has an output, but no call id."""
    body = {"Instruction": "hi", "ToolsJson": json.dumps([entry(mcp)])}
    response = server.ask("POST", "/v1/agent/execute", body, headers={"Accept": "application/json"})
    made = response.json
    assert (response.status, made["Kind"], made["Text"]) == (200, "ok", "The sum is known.")
    assert (made["ToolCalls"], mcp.calls) == ([], [("add", {"one": 2, "other": 3})])


def test_pain_h_73_next_response_of_a_chain_does_not_list_again(server: LiveServer, mcp: WireServer) -> None:
    client = server.client()
    first = client.responses.create(model="scripted", input="hi", tools=[entry(mcp)])
    second = client.responses.create(model="scripted", input="twice", tools=[entry(mcp)], previous_response_id=first.id)
    assert [item.type for item in second.output] == ["mcp_call", "mcp_call", "message"]
    assert ([name for name, _ in mcp.calls], mcp.methods.count("tools/list")) == (["add", "add", "log"], 1)


SEARCH = {"tool_call": {"name": "tool_search", "arguments": {"query": "add numbers"}, "call_id": "call_0"}}
SEARCHED = {
    "native_tools": ["function"],
    "rules": [
        {"user": "sum", "answers": [*[[SEARCH], [call("s__add")], "Found."] * 2]},
        {"answers": ["No search."]},
    ],
}


def test_deferred_server_is_listed_by_the_first_search_only(mcp: WireServer) -> None:
    tools = HostedTools([McpHostedTool(HostedSetup(settings=SETTINGS))])
    live = LiveServer(SEARCHED, SETTINGS, hosted_tools=tools)
    deferred: Any = [{"type": "tool_search"}, entry(mcp, defer_loading=True, server_description="Sums.")]
    try:
        client = live.client()
        idle = client.responses.create(model="scripted", input="hi", tools=deferred)
        assert (idle.output_text, mcp.methods) == ("No search.", [])
        with client.responses.stream(model="scripted", input="sum", tools=deferred) as stream:
            list(stream)
            found = stream.get_final_response()
        again = client.responses.create(model="scripted", input="sum", tools=deferred, previous_response_id=found.id)
    finally:
        live.stop()
    searched = ["tool_search_call", "tool_search_output"]
    assert [item.type for item in found.output] == ["mcp_list_tools", *searched, "mcp_call", "message"]
    assert [item.type for item in again.output] == [*searched, "mcp_call", "message"]
    assert found.output[3].to_dict() | {"id": ""} == {
        "type": "mcp_call",
        "id": "",
        "server_label": "s",
        "name": "add",
        "arguments": '{"one": 2, "other": 3}',
        "output": "5",
        "error": None,
        "status": "completed",
    }
    assert (mcp.methods.count("tools/list"), len(mcp.calls)) == (1, 2)


SERVER: Any = {"type": "mcp", "server_label": "s"}
CHOSEN = {
    "native_tools": ["function"],
    "rules": [
        {"last_item": "function_call_output", "text": "5", "answers": ["Done."]},
        {"last_item": "function_call_output", "answers": [[call("s__log", "call_1"), call("s__add", "call_2")]]},
        {"user": "search", "answers": [[SEARCH]]},
        {"answers": [[call("s__add")]]},
    ],
}


def allow(*tools: Any) -> Any:
    return {"type": "allowed_tools", "mode": "required", "tools": list(tools)}


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("search", allow({"type": "tool_search"}, SERVER | {"name": "add"})),
        ("search", allow({"type": "tool_search"}, SERVER)),
        ("call", allow(SERVER | {"name": "add"})),
        ("call", allow(SERVER)),
        ("call", SERVER | {"name": "add"}),
        ("call", SERVER),
    ],
)
def test_choice_of_a_deferred_server_lets_the_model_call_it(mcp: WireServer, text: str, choice: Any) -> None:
    tools = HostedTools([McpHostedTool(HostedSetup(settings=SETTINGS))])
    live = LiveServer(CHOSEN, SETTINGS, hosted_tools=tools)
    own: Any = {"type": "function", "name": "log", "parameters": {"type": "object", "properties": {}}}
    deferred: Any = [{"type": "tool_search"}, entry(mcp, defer_loading=True), own]
    try:
        response = live.client().responses.create(model="scripted", input=text, tools=deferred, tool_choice=choice)
    finally:
        live.stop()
    allowed = ["log", "add"] if text == "search" and choice["tools"][1] == SERVER else ["add"]
    searched = ["tool_search_call", "tool_search_output"] if text == "search" else []
    assert [item.type for item in response.output] == [
        "mcp_list_tools",
        *searched,
        *["mcp_call"] * len(allowed),
        "message",
    ]
    assert ([name for name, _ in mcp.calls], response.output_text) == (allowed, "Done.")


def test_function_of_the_client_keeps_its_name(server: LiveServer, mcp: WireServer) -> None:
    function = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    client = server.client()
    own = client.responses.create(model="scripted", input="hi", tools=[function, entry(mcp)])  # type: ignore[list-item]
    prefixed = client.responses.create(model="scripted", input="prefixed", tools=[function, entry(mcp)])  # type: ignore[list-item]
    assert [item.type for item in own.output] == ["mcp_list_tools", "function_call"]
    assert (prefixed.output[1].type, prefixed.output[1].name) == ("mcp_call", "add")
    assert len(mcp.calls) == 1


def test_tool_choice_selects_a_tool_of_the_server(server: LiveServer, mcp: WireServer) -> None:
    client = server.client()
    choice: Any = {"type": "mcp", "server_label": "s", "name": "add"}
    chosen = client.responses.create(model="scripted", input="hi", tools=[entry(mcp)], tool_choice=choice)
    assert [item.type for item in chosen.output] == ["mcp_list_tools", "mcp_call", "message"]
    with pytest.raises(BadRequestError) as raised:
        client.responses.create(
            model="scripted", input="hi", tools=[entry(mcp)], tool_choice=choice | {"server_label": "other"}
        )
    assert raised.value.param == "tool_choice.server_label"
    for absent, param in (
        (choice | {"name": "other"}, "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [choice | {"name": "x"}]}, "tool_choice.tools[0].name"),
    ):
        with pytest.raises(BadRequestError) as raised:
            client.responses.create(model="scripted", input="hi", tools=[entry(mcp)], tool_choice=absent)
        assert (raised.value.param, raised.value.code) == (param, "invalid_value")


def test_pain_h_72_approved_call_is_executed_once_in_the_next_response(server: LiveServer, mcp: WireServer) -> None:
    client = server.client()
    tools = [entry(mcp, require_approval="always")]
    first = client.responses.create(model="scripted", input="hi", tools=tools)
    request = first.output[-1]
    assert (first.status, request.type, mcp.calls) == ("completed", "mcp_approval_request", [])
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
    again: Any = {"model": "scripted", "input": [answer], "tools": tools, "previous_response_id": first.id}
    second = client.responses.create(**again)
    (done, message) = second.output
    assert (done.type, done.approval_request_id, done.output, message.type) == ("mcp_call", request.id, "5", "message")
    with pytest.raises(BadRequestError) as raised:
        client.responses.create(**again)
    assert (raised.value.code, raised.value.param) == ("approval_already_used", "input")
    with pytest.raises(BadRequestError) as repeated:
        client.responses.create(**again | {"previous_response_id": second.id})
    assert repeated.value.param == "input[0].approval_request_id"
    third = client.responses.create(model="scripted", input="x", previous_response_id=second.id, tools=tools)
    assert (third.output[-1].type, len(mcp.calls)) == ("mcp_approval_request", 1)


def test_model_gets_the_denial_of_a_call(server: LiveServer, mcp: WireServer) -> None:
    client = server.client()
    tools = [entry(mcp, require_approval="always")]
    first = client.responses.create(model="scripted", input="hi", tools=tools)
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": first.output[-1].id, "approve": False}
    second = client.responses.create(model="scripted", input=[answer], tools=tools, previous_response_id=first.id)
    assert ([item.type for item in second.output], second.output_text) == (["message"], "As you wish.")
    again: Any = {"model": "scripted", "tools": tools, "previous_response_id": first.id}
    assert client.responses.create(input=[answer], **again).output_text == "As you wish."
    with pytest.raises(BadRequestError) as raised:
        client.responses.create(input=[answer | {"approve": True}], **again)
    assert (raised.value.code, mcp.calls) == ("approval_already_used", [])


def test_approved_call_counts_for_max_tool_calls(server: LiveServer, mcp: WireServer) -> None:
    client = server.client()
    tools = [entry(mcp, require_approval={"always": {"tool_names": ["add"]}})]
    first = client.responses.create(model="scripted", input="more", tools=tools)
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": first.output[-1].id, "approve": True}
    second = client.responses.create(
        model="scripted", input=[answer], tools=tools, previous_response_id=first.id, max_tool_calls=1
    )
    assert [item.type for item in second.output] == ["mcp_call", "message"]
    assert [name for name, _ in mcp.calls] == ["add"]


@pytest.mark.parametrize("approve", [True, False])
def test_tool_runner_of_the_official_client_approves(server: LiveServer, mcp: WireServer, approve: bool) -> None:
    params: Any = {"model": "scripted", "input": "hi", "tools": [entry(mcp, require_approval="always")]}
    runner = ResponsesToolRunner()
    response = runner.run(server.client(), params, approve_mcp=lambda _: approve, stream=True)
    runner.close()
    assert (response.status, len(mcp.calls)) == ("completed", int(approve))
    assert response.output_text == ("The sum is known." if approve else "As you wish.")


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (
            [{"type": "mcp_approval_response", "approval_request_id": "mcpr_x", "approve": True}],
            "input[0].approval_request_id",
        ),
        (
            [
                {
                    "type": "mcp_approval_request",
                    "id": "mcpr_y",
                    "name": "add",
                    "arguments": "{}",
                    "server_label": "other",
                },
                {"type": "mcp_approval_response", "approval_request_id": "mcpr_y", "approve": True},
            ],
            "tools",
        ),
    ],
)
def test_approval_of_an_unknown_call_is_refused(server: LiveServer, mcp: WireServer, items: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        server.client().responses.create(model="scripted", input=items, tools=[entry(mcp)])
    assert raised.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_server_that_cannot_list_fails_the_request(
    server: LiveServer, mcp: WireServer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mcp.status = 401
    tools = [entry(mcp, authorization=SECRET)]
    with pytest.raises(APIStatusError) as raised:
        server.client().responses.create(model="scripted", input="hi", tools=tools, stream=stream)
    error: Any = raised.value.body
    assert raised.value.status_code == 424
    assert error == {
        "message": "Error retrieving tool list from MCP server: 's'. Http status code: 401 (Unauthorized)",
        "type": "external_connector_error",
        "param": "tools",
        "code": "http_error",
    }
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("background", [False, True])
def test_credentials_are_sent_but_neither_stored_nor_logged(
    server: LiveServer, mcp: WireServer, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    client = server.client()
    tools = [entry(mcp, authorization=SECRET, headers={"X-Extra": f"{SECRET}-2"})]
    response = client.responses.create(model="scripted", input="hi", tools=tools, background=background)
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    assert (response.status, response.output[1].type) == ("completed", "mcp_call")
    assert {(headers.get("authorization"), headers.get("x-extra")) for headers in mcp.headers} == {
        (f"Bearer {SECRET}", f"{SECRET}-2")
    }
    stored = client.responses.with_raw_response.retrieve(response.id).text
    assert '"server_label":"s"' in stored
    own_log = [record for record in caplog.records if record.name.startswith(("antiphon", "httpx2", "mcp", "client"))]
    shown = stored + response.to_json() + "".join(record.getMessage() for record in own_log)
    assert SECRET not in shown
