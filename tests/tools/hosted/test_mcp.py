"""The hosted tool `mcp`: lists, calls, approvals, credentials and servers that fail."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from antiphon.config.tools import McpServerSettings
from antiphon.errors import ConnectorError, InvalidRequest
from antiphon.protocol.codec import decode_items
from antiphon.tools.hosted.base import HostedContext, HostedSession, HostedSetup
from antiphon.tools.hosted.mcp import calls
from antiphon.tools.hosted.mcp.tool import McpHostedTool
from antiphon.upstream.addresses import OutboundRules
from support.hosted_sessions import (
    Claims,
    collect,
    compose,
    list_types,
    make_context,
    make_settings,
    run_begun,
    run_call,
)
from support.idle_clock import count_idle_time
from support.mcp_wire_server import WireServer, serve_mcp

NAMES = ("add", "log", "read")


def add(arguments: dict[str, Any]) -> str:
    return str(arguments["one"] + arguments["other"])


TOOLS = {"add": add, "log": lambda _: "logged", "read": lambda _: "text"}
HINTS = {"read": {"readOnlyHint": True}, "log": {"idempotentHint": True}}


@asynccontextmanager
async def hosting(**settings: Any) -> AsyncIterator[McpHostedTool]:
    tool = McpHostedTool(HostedSetup(settings=make_settings(**settings)))
    try:
        yield tool
    finally:
        await tool.close()


def entry(server: WireServer, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "s", "server_url": server.url, "require_approval": "never"} | fields


async def open_session(tool: McpHostedTool, context: HostedContext) -> HostedSession:
    assert context.request.tools is not None
    async with asyncio.timeout(20):
        return await tool.open(context.request.tools[0], context)


async def test_list_and_call_have_the_documented_events() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        server.annotations = HINTS
        session = await open_session(tool, make_context([entry(server)]))
        arguments = '{"one": 1, "other": 2}'
        call = session.begin("add", "c1")
        written = [*call.write('{"one": 1'), *call.write(', "other": 2}')]
        deltas = [*await collect(session.introduce()), *written, *await run_begun(call, arguments)]
    events, output = compose(deltas)
    assert list_types(events) == [
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
    ]
    assert events[0]["item"] == {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []}
    schema = {"type": "object", "properties": {}}
    assert output == [
        {
            "type": "mcp_list_tools",
            "id": "mcpl_1",
            "server_label": "s",
            "tools": [
                {
                    "name": name,
                    "input_schema": schema,
                    "annotations": {"read_only": name == "read"} | ({"idempotent": True} if name == "log" else {}),
                    "description": f"The tool {name}.",
                }
                for name in NAMES
            ],
        },
        {
            "type": "mcp_call",
            "id": "mcp_2",
            "arguments": arguments,
            "name": "add",
            "server_label": "s",
            "error": None,
            "output": "3",
            "status": "completed",
        },
    ]
    assert (events[8]["item_id"], events[8]["arguments"], events[8]["output_index"]) == ("mcp_2", arguments, 1)
    assert [function.name for function in session.functions] == list(NAMES)


async def test_list_in_the_context_is_not_requested_again() -> None:
    listed = {
        "type": "mcp_list_tools",
        "id": "mcpl_1",
        "server_label": "s",
        "tools": [{"name": "add", "input_schema": {"type": "object"}, "annotations": {"read_only": False}}],
    }
    failed = listed | {"id": "mcpl_2", "tools": [], "error": {"type": "http_error", "code": 500, "message": "no"}}
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        session = await open_session(tool, make_context([entry(server)], input=[listed, failed]))
        introduced = await collect(session.introduce())
        _, output = compose(await run_call(session, "add", '{"one": 1, "other": 2}'))
        other = {"tools": [entry(server, server_label="other")]}
        again = await open_session(tool, make_context(other["tools"], input=[listed]))
    assert (introduced, output[0]["output"]) == ([], "3")
    assert [function.name for function in session.functions] == ["add"]
    assert (server.methods.count("tools/list"), len(again.functions)) == (1, 3)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, ["add", "log", "read"]),
        (["add", "missing"], ["add"]),
        ([], []),
        ({"tool_names": ["log"]}, ["log"]),
        ({"read_only": True}, ["read"]),
        ({"read_only": False}, ["add", "log"]),
        ({"read_only": False, "tool_names": ["read", "log"]}, ["log"]),
        ({}, ["add", "log", "read"]),
    ],
)
async def test_allowed_tools_filter_the_list(allowed: Any, expected: list[str]) -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        server.annotations = HINTS
        session = await open_session(tool, make_context([entry(server, allowed_tools=allowed)]))
        _, output = compose(await collect(session.introduce()))
    assert [each["name"] for each in output[0]["tools"]] == expected
    assert [function.name for function in session.functions] == expected


@pytest.mark.parametrize(
    ("rule", "asking"),
    [
        (None, ["add", "log", "read"]),
        ("always", ["add", "log", "read"]),
        ("never", []),
        ({"always": {"tool_names": ["add"]}}, ["add"]),
        ({"never": {"tool_names": ["add"]}}, ["log", "read"]),
        ({"never": {"read_only": True}}, ["add", "log"]),
        ({"always": {"read_only": False}}, ["add", "log"]),
        ({"always": {"tool_names": ["add"]}, "never": {"tool_names": ["log"]}}, ["add", "read"]),
        ({"always": {"tool_names": ["add"]}, "never": {"tool_names": ["add"]}}, ["add", "log", "read"]),
        ({"never": {}}, []),
        ({"always": {}}, ["add", "log", "read"]),
        ({}, ["add", "log", "read"]),
    ],
)
async def test_require_approval_decides_for_each_tool(rule: Any, asking: list[str]) -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        server.annotations = HINTS
        session = await open_session(tool, make_context([entry(server, require_approval=rule)]))
        types = {name: compose(await run_call(session, name, '{"one":1,"other":2}'))[1][0]["type"] for name in NAMES}
    assert types == {name: "mcp_approval_request" if name in asking else "mcp_call" for name in NAMES}
    assert [name for name, _ in server.calls] == [name for name in NAMES if name not in asking]


async def test_approval_request_ends_the_response_without_a_call() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        session = await open_session(tool, make_context([entry(server, require_approval="always")]))
        call = session.begin("add", "c1")
        deltas = [*call.write('{"one":'), *await run_begun(call, '{"one": 1}')]
    events, output = compose(deltas)
    item = {
        "type": "mcp_approval_request",
        "id": "mcpr_1",
        "arguments": '{"one": 1}',
        "name": "add",
        "server_label": "s",
    }
    assert list_types(events) == ["output_item.added", "output_item.done"]
    assert ([event["item"] for event in events], output) == ([item, item], [item])
    assert (call.needs_client, server.calls) == (True, [])


def make_approval(*, approve: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "type": "mcp_approval_request",
            "id": "mcpr_9",
            "arguments": '{"one": 2, "other": 3}',
            "name": "add",
            "server_label": "s",
        },
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_9", "approve": approve},
    ]


async def test_approved_call_is_executed_once() -> None:
    claims = Claims()
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        tools = [entry(server, require_approval="always")]
        session = await open_session(tool, make_context(tools, input=make_approval(), claims=claims))
        (pending,) = session.pending
        _, output = compose(await run_begun(pending.begin("c1"), pending.arguments))
        with pytest.raises(InvalidRequest) as raised:
            await open_session(tool, make_context(tools, input=make_approval(), response_id="resp_2", claims=claims))
        repeated = await open_session(tool, make_context(tools, input=make_approval(), claims=claims))
    assert (pending.name, server.calls) == ("add", [("add", {"one": 2, "other": 3})])
    assert output == [
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "arguments": '{"one": 2, "other": 3}',
            "name": "add",
            "server_label": "s",
            "approval_request_id": "mcpr_9",
            "error": None,
            "output": "5",
            "status": "completed",
        }
    ]
    assert (raised.value.code, raised.value.param) == ("approval_already_used", "input")
    assert len(repeated.pending) == 1  # another attempt at the same response: the loop decides by its journal


async def test_answered_or_denied_approval_is_not_pending() -> None:
    done = {
        "type": "mcp_call",
        "id": "mcp_1",
        "arguments": "{}",
        "name": "add",
        "server_label": "s",
        "approval_request_id": "mcpr_9",
        "output": "5",
    }
    earlier = decode_items(b'[{"type":"mcp_approval_response","approval_request_id":"mcpr_9","approve":true}]')
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        tools = [entry(server)]
        contexts = [
            make_context(tools, input=[*make_approval(), done]),
            make_context(tools, input=make_approval(approve=False)),
            make_context(tools, earlier, input=make_approval()[:1]),  # the approval belongs to an earlier request
        ]
        assert [(await open_session(tool, context)).pending for context in contexts] == [[], [], []]


async def test_approval_with_a_long_id_is_claimed_by_a_short_key() -> None:
    claims = Claims()
    long = "mcpr_" + "x" * 5000
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        tools = [entry(server, require_approval="always")]
        for request_id in (long, "mcpr_1/resp_1"):
            approval = [item | {"id": request_id} for item in make_approval()[:1]]
            approval.append({"type": "mcp_approval_response", "approval_request_id": request_id, "approve": True})
            await open_session(tool, make_context(tools, input=approval, claims=claims))
            with pytest.raises(InvalidRequest, match="was answered already"):
                await open_session(tool, make_context(tools, input=approval, response_id="resp_2", claims=claims))
    assert max(len(key) for _, key in claims.keys) < 200
    assert not any("mcpr_1/resp_1" in key for _, key in claims.keys)


async def test_result_that_is_too_large_is_a_failed_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_RESULT_BYTES", 100)
    async with serve_mcp({"run": lambda _: "x" * 101}) as server, hosting() as tool:
        session = await open_session(tool, make_context([entry(server)]))
        _, output = compose(await run_call(session, "run", ""))
    assert output[0]["error"]["message"] == "The result is larger than 100 bytes."
    assert output[0]["arguments"] == "{}"


async def test_arguments_that_are_no_object_fail_without_a_call() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        tools = [entry(server), entry(server, require_approval="always")]
        outputs = [
            compose(await run_call(await open_session(tool, make_context([each])), "add", "[1"))[1] for each in tools
        ]
    error = {"type": "mcp_protocol_error", "code": -32602, "message": "The arguments are not a JSON object."}
    assert [(each[0]["type"], each[0]["error"]) for each in outputs] == [("mcp_call", error)] * 2
    assert server.calls == []


async def test_server_that_hangs_fails_the_call() -> None:
    count_idle_time(asyncio.get_running_loop())

    async def hang(_: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async with serve_mcp({"hang": hang, "add": add}) as server:
        servers = {"slow": McpServerSettings(url=server.url, timeout=0.2)}
        async with hosting(mcp_servers=servers) as tool:
            entries = [{"type": "mcp", "server_label": "slow", "require_approval": "never"}]
            session = await open_session(tool, make_context(entries))
            _, output = compose(await run_call(session, "hang", "{}"))
            _, after = compose(await run_call(session, "add", '{"one": 1, "other": 1}'))
    assert output[0]["error"] == {
        "type": "http_error",
        "code": 504,
        "message": "The server did not answer in 0.2 s. The call may or may not have taken effect.",
    }
    assert after[0]["output"] == "2"


async def test_lost_connection_fails_the_call_and_is_replaced() -> None:
    async with serve_mcp({"add": add, "drop": lambda _: 1 / 0}) as server, hosting() as tool:
        session = await open_session(tool, make_context([entry(server)]))
        _, output = compose(await run_call(session, "drop", "{}"))
        _, after = compose(await run_call(session, "add", '{"one": 1, "other": 1}'))
    assert (output[0]["status"], output[0]["error"]["type"]) == ("failed", "http_error")
    assert "may or may not have taken effect" in output[0]["error"]["message"]
    assert after[0]["output"] == "2"


async def test_older_transport_is_used_if_the_server_has_no_other() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        session = await open_session(tool, make_context([entry(server, server_url=server.sse_url)]))
        _, output = compose(await run_call(session, "add", '{"one": 1, "other": 1}'))
    assert output[0]["output"] == "2"


async def test_connection_is_shared_only_with_equal_credentials() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        for secret in ("key-one", "key-two", "key-one", None, None):
            await open_session(tool, make_context([entry(server, authorization=secret)]))
        assert server.methods.count("initialize") == 3


@pytest.mark.parametrize("status", [401, 403, 500])
async def test_list_that_fails_is_an_error_with_the_status(status: int) -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        server.status = status
        with pytest.raises(ConnectorError) as raised:
            await open_session(tool, make_context([entry(server, authorization="key-123456")]))
    error = raised.value
    assert (error.status, error.type, error.code, error.param) == (
        424,
        "external_connector_error",
        "http_error",
        "tools",
    )
    assert error.message.startswith(f"Error retrieving tool list from MCP server: 's'. Http status code: {status} (")
    assert error.__cause__ is None  # it would be logged, and its text may contain a secret


async def test_list_that_fails_after_the_beginning_is_a_failed_item() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        server.status = 503
        session = await open_session(tool, make_context([entry(server)], has_begun=True))
        events, output = compose(await collect(session.introduce()))
    assert list_types(events) == [
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.failed",
        "output_item.done",
    ]
    (item,) = output
    assert (item["tools"], item["error"]["type"], item["error"]["code"]) == ([], "http_error", 503)
    assert session.functions == []


@pytest.mark.parametrize("location", ["http://10.0.0.1/mcp", "http://localhost/mcp"])
async def test_redirect_to_another_server_is_not_followed(location: str) -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        server.redirect = location
        with pytest.raises(ConnectorError):
            await open_session(tool, make_context([entry(server)]))


async def test_private_server_url_is_refused() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        with pytest.raises(InvalidRequest, match="private network") as raised:
            await open_session(tool, make_context([entry(server)], rules=OutboundRules()))
    assert (raised.value.param, server.connections) == ("tools[0].server_url", 0)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"server_url": None}, "tools[0].server_url", "missing_required_parameter"),
        ({"server_label": ""}, "tools[0].server_label", "invalid_value"),
        ({"server_url": None, "connector_id": "connector_gmail"}, "tools[0].connector_id", "invalid_value"),
        ({"connector_id": "x"}, "tools[0]", "invalid_value"),
        ({"server_url": "ftp://example.com"}, "tools[0].server_url", "invalid_value"),
        ({"server_url": "http://exam]ple.com/"}, "tools[0].server_url", "invalid_value"),
        ({"server_url": "http://us[er:pw]@example.com/"}, "tools[0].server_url", "invalid_value"),
        ({"tunnel_id": "tunnel_1"}, "tools[0].tunnel_id", "unsupported_parameter"),
        ({"headers": {"bad name": "x"}}, "tools[0].headers", "invalid_value"),
        ({"headers": {"X": "a\r\nY: b"}}, "tools[0].headers", "invalid_value"),
        ({"authorization": "a\nb"}, "tools[0].authorization", "invalid_value"),
    ],
)
async def test_invalid_tool_is_refused_by_its_field(fields: dict[str, Any], param: str, code: str) -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        with pytest.raises(InvalidRequest) as raised:
            await open_session(tool, make_context([entry(server, **fields)]))
    assert (raised.value.param, raised.value.code) == (param, code)
    assert "a\r\nY" not in raised.value.message


async def test_server_of_the_settings_is_found_by_label_or_connector() -> None:
    async with serve_mcp(TOOLS) as server:
        servers = {"notes": McpServerSettings(url=server.url, authorization="own-key", description="My notes.")}
        async with hosting(mcp_servers=servers) as tool:
            by_label = await open_session(
                tool, make_context([{"type": "mcp", "server_label": "notes"}], rules=OutboundRules())
            )
            entries = [{"type": "mcp", "server_label": "n", "connector_id": "notes"}]
            by_connector = await open_session(tool, make_context(entries, rules=OutboundRules()))
    assert (len(by_label.functions), by_label.label, by_connector.label) == (3, "notes", "n")
    assert by_connector.instructions == "The tools of the MCP server 'n': My notes."
    assert {headers.get("authorization") for headers in server.headers} == {"Bearer own-key"}
    assert server.methods.count("initialize") == 1


async def test_echo_has_no_credentials() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        url = server.url.replace("://", "://user:secret-1@")
        fields = {"headers": {"X-Key": "secret-2"}, "authorization": "secret-3", "server_url": url}
        context = make_context([entry(server, require_approval=None, **fields)])
        assert context.request.tools is not None
        shown = tool.echo(context.request.tools[0])
    assert "secret" not in repr(shown)
    assert (shown.server_url, shown.require_approval) == (server.url, "always")  # type: ignore[union-attr]


async def test_repeatable_calls_are_those_that_the_server_declares() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        server.annotations = HINTS
        session = await open_session(tool, make_context([entry(server)]))
        assert {name: session.begin(name, "c").is_repeatable for name in NAMES} == {
            "add": False,
            "log": True,
            "read": True,
        }


async def test_interrupted_call_has_its_arguments() -> None:
    async with serve_mcp(TOOLS) as server, hosting() as tool:
        call = (await open_session(tool, make_context([entry(server)]))).begin("log", "c1")
    _, (item,) = compose([*call.write('{"a"'), *call.write(": 1}"), *call.fail("interrupted")])
    assert (item["status"], item["arguments"], item["error"]["message"]) == ("failed", '{"a": 1}', "interrupted")


async def test_pain_h_74_program_of_the_settings_is_started_once(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "support" / "mcp_server.py"
    settings = McpServerSettings(command=sys.executable, args=(str(program), str(tmp_path), "modern"))
    async with hosting(mcp_servers={"numbers": settings}) as tool:
        entries = [{"type": "mcp", "server_label": "numbers", "require_approval": "never", "allowed_tools": ["add"]}]
        first = await open_session(tool, make_context(entries, rules=OutboundRules()))
        second = await open_session(tool, make_context(entries, rules=OutboundRules()))
        outputs = [compose(await run_call(each, "add", '{"one": 1, "other": 2}'))[1] for each in (first, second)]
        with pytest.raises(InvalidRequest) as raised:
            await open_session(tool, make_context([entries[0] | {"authorization": "key"}]))
    assert [output[0]["output"] for output in outputs] == ["3", "3"]
    assert (tmp_path / "requests").read_text().split().count("server/discover") == 1
    assert raised.value.param == "tools[0].authorization"
