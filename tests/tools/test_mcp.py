"""Tools of real MCP servers, over stdio and over streamable HTTP."""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from antiphon import Agent, tool
from antiphon.errors import ConfigError, Unavailable, UpstreamError
from antiphon.testing.scripted import ScriptedTransport
from antiphon.tools.base import Tool, ToolContext, ToolInvocation, ToolResult
from antiphon.tools.executor import Executor
from antiphon.tools.mcp import McpServer
from support.ports import port_of, reserve_port

PROGRAM = Path(__file__).parents[1] / "support" / "mcp_server.py"
WAIT_SECONDS = 30
CONTEXT = ToolContext(run_id="run_1", call_id="call_1", idempotency_key="key_1")
LOST = "was lost. The call may or may not have taken effect."

# Importing the package takes most of a server's start, so the fork server does it once.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["mcp.server.mcpserver", "mcp.server.streamable_http_manager", "uvicorn"])
# For tests that share a server.
on_one_loop = pytest.mark.asyncio(loop_scope="module")


class HttpProgram:
    """The test server over HTTP in a process that can be killed and restarted."""

    def __init__(self, folder: Path, era: str = "modern") -> None:
        self.folder = folder
        self._era = era
        self._reserved = reserve_port()
        self._port = port_of(self._reserved)
        self.url = f"http://127.0.0.1:{self._port}/mcp"
        self._process: ForkServerProcess | None = None

    def start(self) -> None:
        from support.mcp_server import serve_http

        self._process = forkserver.Process(target=serve_http, args=(self.folder, self._era, self._port), daemon=True)
        self._process.start()
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join(WAIT_SECONDS)

    def close(self) -> None:
        self.kill()
        self._reserved.close()


@contextlib.contextmanager
def running(folder: Path, era: str = "modern") -> Iterator[HttpProgram]:
    program = HttpProgram(folder, era)
    try:
        program.start()
        yield program
    finally:
        program.close()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, HttpProgram]]:
    make = tmp_path_factory.mktemp
    with running(make("modern")) as modern, running(make("legacy"), "legacy") as legacy:
        yield {"modern": modern, "legacy": legacy}


def start_stdio(folder: Path, era: str = "modern", **options: Any) -> McpServer:
    return McpServer.stdio(sys.executable, [str(PROGRAM), str(folder), era], **options)


@pytest.fixture(params=["stdio", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["modern", "legacy"])
def era(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stdio_servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, tuple[Path, McpServer]]]:
    """Yield connected servers over stdio by era, with their folders."""
    new, old = tmp_path_factory.mktemp("modern"), tmp_path_factory.mktemp("legacy")
    async with start_stdio(new) as modern, start_stdio(old, "legacy") as legacy:
        yield {"modern": (new, modern), "legacy": (old, legacy)}


@pytest.fixture
def folder(
    transport: str, era: str, programs: dict[str, HttpProgram], stdio_servers: dict[str, tuple[Path, McpServer]]
) -> Path:
    return stdio_servers[era][0] if transport == "stdio" else programs[era].folder


@pytest_asyncio.fixture(loop_scope="module")
async def server(
    transport: str, era: str, programs: dict[str, HttpProgram], stdio_servers: dict[str, tuple[Path, McpServer]]
) -> AsyncIterator[McpServer]:
    if transport == "stdio":
        yield stdio_servers[era][1]
    else:
        async with McpServer.http(programs[era].url) as server:
            yield server


def count_requests(folder: Path, method: str = "tools/list") -> int:
    return (folder / "requests").read_text().split().count(method)


async def call(server: McpServer, name: str, arguments: str = "{}", context: ToolContext = CONTEXT) -> ToolResult:
    return await Executor(server.tools).execute(ToolInvocation("call_1", name, arguments), context)


async def wait_until(happens: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        for _ in itertools.count():
            if happens():
                return
            await asyncio.sleep(0.01)


def by_name(server: McpServer) -> dict[str, Tool]:
    return {tool.name: tool for tool in server.tools}


@on_one_loop
async def test_server_tools_have_the_schema_of_the_server(server: McpServer) -> None:
    tools = by_name(server)
    assert sorted(name for name in tools if "fresh" not in name) == [
        "add",
        "count",
        "die",
        "fail",
        "grow",
        "hang",
        "look_up",
        "show",
        "work",
    ]
    assert tools["add"].describe() == {
        "type": "function",
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "title": "addArguments",
            "properties": {"one": {"title": "One", "type": "integer"}, "other": {"title": "Other", "type": "integer"}},
            "required": ["one", "other"],
        },
        "strict": False,
    }
    assert tools["count"].description == "count"
    assert (tools["add"].timeout, tools["add"].needs_approval) == (300.0, False)


@on_one_loop
@pytest.mark.parametrize("transport", ["http"])
async def test_structured_content_in_the_text_is_not_repeated(server: McpServer) -> None:
    assert await call(server, "add", '{"one": 1, "other": 2}') == ToolResult("3")
    assert await call(server, "count", '{"to": 3}') == ToolResult("0\n1\n2")
    found = await call(server, "look_up", '{"city": "Bern"}')
    assert (msgspec.json.decode(str(found.output)), found.is_error) == ({"city": "Bern", "height": None}, False)


@on_one_loop
@pytest.mark.parametrize("transport", ["http"])
async def test_every_content_type_is_translated(server: McpServer) -> None:
    assert await call(server, "show") == ToolResult(
        [
            {"type": "input_text", "text": "Look:"},
            {"type": "input_image", "image_url": "data:image/png;base64,aW1hZ2U="},
            {"type": "input_text", "text": '{"audio":"audio/wav","base64_characters":8,"note":"cannot be shown"}'},
            {"type": "input_text", "text": "a note"},
            {"type": "input_image", "image_url": "data:image/gif;base64,aW1hZ2U="},
            {
                "type": "input_text",
                "text": '{"resource":"file://3","mime_type":"application/zip","base64_characters":4,'
                '"note":"cannot be shown"}',
            },
            {"type": "input_text", "text": '{"name":"more","uri":"https://example.org/more","type":"resource_link"}'},
            {"type": "input_text", "text": '{"a":null,"b":[1]}'},
        ],
        is_error=True,
    )


@on_one_loop
async def test_pain_agents_40_tool_error_is_returned_as_output(server: McpServer) -> None:
    failed = await call(server, "fail", '{"message": "no such thing"}')
    assert failed == ToolResult("Error executing tool fail: no such thing", is_error=True)
    refused = await call(server, "add", '{"one": "x"}')
    assert refused.is_error
    assert "validation error" in str(refused.output)
    assert (await call(server, "add", "[1, 2]")).is_error
    assert (await call(server, "add", "{")).is_error
    assert await call(server, "add", '{"one": 2, "other": 2}') == ToolResult("4")


@on_one_loop
async def test_pain_servers_73_tools_are_listed_again_only_after_a_change(
    server: McpServer, folder: Path, tmp_path: Path
) -> None:
    before = count_requests(folder)
    fresh = f"fresh_{tmp_path.name[-20:]}"
    for _ in range(5):
        await call(server, "add", '{"one": 1, "other": 2}')
        await call(server, "look_up", '{"city": "Bern"}')
    assert count_requests(folder) == before
    assert fresh not in by_name(server)
    await call(server, "grow", f'{{"name": "{fresh}"}}')
    await wait_until(lambda: fresh in by_name(server))
    assert await call(server, fresh) == ToolResult("new")
    assert count_requests(folder) == before + 1


@on_one_loop
@pytest.mark.parametrize(("transport", "era"), [("stdio", "modern")])
async def test_agent_can_use_a_tool_that_was_added_during_its_run(server: McpServer) -> None:
    answers = [
        [{"tool_call": {"name": "grow", "arguments": {"name": "fresh_for_agent"}}}],
        [{"tool_call": {"name": "wait_for_list", "arguments": {}}}],
        [{"tool_call": {"name": "fresh_for_agent", "arguments": {}}}],
        "Done.",
    ]

    @tool
    async def wait_for_list() -> str:
        """Wait until the list has the new tool."""
        await wait_until(lambda: "fresh_for_agent" in by_name(server))
        return "listed"

    transport = ScriptedTransport({"rules": [{"answers": answers}]})
    agent = Agent(model="scripted", transport=transport, tools=lambda _: [wait_for_list, *server.tools])
    outcome = await agent.run("Grow.")
    await agent.close()
    outputs = [item["output"] for item in outcome.history if item.get("type") == "function_call_output"]
    assert (outcome.kind, outputs) == ("final", ["grown", "listed", "new"])


@on_one_loop
async def test_call_sends_idempotency_key_and_reports_progress(server: McpServer) -> None:
    messages: list[str] = []
    context = msgspec.structs.replace(CONTEXT, report=messages.append)
    assert await call(server, "work", context=context) == ToolResult("key_1")
    await wait_until(lambda: messages == ["half way"])


@on_one_loop
@pytest.mark.parametrize("era", ["modern"])
async def test_parallel_calls_share_the_connection(server: McpServer) -> None:
    results = await asyncio.gather(*(call(server, "add", f'{{"one": {n}, "other": 1}}') for n in range(20)))
    assert results == [ToolResult(str(n + 1)) for n in range(20)]


async def test_options_apply_to_the_tools_they_name(programs: dict[str, HttpProgram]) -> None:
    url = programs["modern"].url
    options: dict[str, Any] = {
        "prefix": "my.",
        "allow": ["add", "fail", "look.up"],
        "timeout": {"add": 5.0},
        "needs_approval": {"fail"},
    }
    async with McpServer.http(url, **options) as server:
        assert {tool.name: (tool.timeout, tool.needs_approval) for tool in server.tools} == {
            "my_add": (5.0, False),
            "my_fail": (300.0, True),
            "my_look_up": (300.0, False),
        }
        assert await call(server, "my_look_up", '{"city": "Bern"}') == await call(
            server, "my_look_up", '{"city": "Bern"}'
        )
    async with McpServer.http(url, timeout=None, needs_approval=True) as server:
        assert {(tool.timeout, tool.needs_approval) for tool in server.tools} == {(None, True)}


@pytest.mark.parametrize("option", [{"allow": ["ad"]}, {"timeout": {"ad": 1.0}}, {"needs_approval": ["ad"]}])
async def test_option_for_an_unknown_tool_is_rejected(programs: dict[str, HttpProgram], option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"has no tool 'ad' \(.*\)\. It has: add, count"):
        async with McpServer.http(programs["modern"].url, **option):
            raise AssertionError


def test_unknown_option_of_a_server_is_rejected() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'alow'"):
        McpServer.http("http://127.0.0.1:9/mcp", alow=["add"])  # type: ignore[call-arg]


async def test_server_stays_usable_after_a_tool_timeout(programs: dict[str, HttpProgram]) -> None:
    async with McpServer.http(programs["modern"].url, timeout={"hang": 0.05}) as server:
        hung = await call(server, "hang")
        assert (hung.is_error, "longer than 0.05 seconds" in str(hung.output)) == (True, True)
        assert await call(server, "add", '{"one": 1, "other": 2}') == ToolResult("3")


async def test_server_that_dies_in_a_call_is_restarted_by_the_next_call(tmp_path: Path) -> None:
    async with start_stdio(tmp_path) as server:
        died, hung = await asyncio.gather(call(server, "die"), call(server, "hang"))
        assert (died.is_error, hung.is_error) == (True, True)
        assert LOST in str(died.output)
        again = await asyncio.gather(*(call(server, "add", '{"one": 1, "other": 2}') for _ in range(3)))
        assert again == [ToolResult("3")] * 3
        assert count_requests(tmp_path) == 2


async def test_dead_server_is_restarted_before_a_call(tmp_path: Path) -> None:
    async with McpServer.stdio(
        "/bin/sh",
        ["-c", f'echo $$ > {tmp_path}/pid; exec "$0" "$@"', sys.executable, str(PROGRAM), str(tmp_path), "modern"],
    ) as server:
        assert server._client is not None
        assert server._client._connection is not None
        state = server._client._connection.state
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        await wait_until(lambda: state.lost)
        assert await call(server, "add", '{"one": 1, "other": 2}') == ToolResult("3")


async def test_server_that_cannot_restart_is_an_error_each_time(tmp_path: Path) -> None:
    marker = tmp_path / "once"
    script = f'if [ -e {marker} ]; then exit 1; fi; touch {marker}; exec "$0" "$@"'
    async with McpServer.stdio(
        "/bin/sh", ["-c", script, sys.executable, str(PROGRAM), str(tmp_path), "modern"]
    ) as server:
        assert (await call(server, "die")).is_error
        for _ in range(2):
            gone = await call(server, "add", '{"one": 1, "other": 2}')
            assert (gone.is_error, "cannot be used" in str(gone.output)) == (True, True)


@pytest.mark.parametrize("dies_in_a_call", [True, False])
async def test_restarted_http_server_is_used_again(era: str, tmp_path: Path, dies_in_a_call: bool) -> None:
    with running(tmp_path, era) as program:
        async with McpServer.http(program.url) as server:
            tools = server.tools
            if dies_in_a_call:
                died = await call(server, "die")
                assert (died.is_error, LOST in str(died.output)) == (True, True)
            program.kill()
            program.start()
            again = await Executor(tools).execute(ToolInvocation("c", "add", '{"one": 1, "other": 2}'), CONTEXT)
            if not dies_in_a_call and again.is_error:  # only this call detected the restart
                again = await Executor(tools).execute(ToolInvocation("c", "add", '{"one": 1, "other": 2}'), CONTEXT)
            assert again == ToolResult("3")


async def test_call_after_close_reports_a_closed_connection(programs: dict[str, HttpProgram]) -> None:
    async with McpServer.http(programs["modern"].url) as server:
        pass
    over = await call(server, "add", '{"one": 1, "other": 2}')
    assert (over.is_error, "is closed" in str(over.output)) == (True, True)


def test_wrong_arguments_of_a_program_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"args: expected a list of texts, got a text. Use \['server.py'\]."):
        McpServer.stdio("python", "server.py")
    environment: Any = {"DEBUG": 1}
    with pytest.raises(ConfigError, match=r"'python' cannot be started: env\.DEBUG: Input should be a valid string\."):
        McpServer.stdio("python", env=environment)
    names: Any = "add"
    with pytest.raises(ConfigError, match=r"allow: expected a list of names, got a text. Use \['add'\]."):
        McpServer.stdio("python", allow=names)


async def test_program_and_its_arguments_can_be_paths(tmp_path: Path) -> None:
    async with McpServer.stdio(Path(sys.executable), [PROGRAM, tmp_path, "modern"]) as server:
        assert "add" in [each.name for each in server.tools]


def test_tools_of_a_server_that_was_not_connected_are_an_error() -> None:
    with pytest.raises(Unavailable, match="is not connected: use it inside of 'async with'"):
        Agent(model="m", base_url="http://127.0.0.1/v1", tools=[*McpServer.stdio("python").tools])


async def test_unusable_server_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"url: '127\.0\.0\.1:80/mcp' must begin with http:// or https://\."):
        McpServer.http("127.0.0.1:80/mcp")
    assert isinstance(McpServer.http("HTTP://127.0.0.1:80/mcp"), McpServer)
    with pytest.raises(ConfigError, match="'no-such-program' cannot be started: No such file or directory"):
        async with McpServer.stdio("no-such-program"):
            raise AssertionError
    with pytest.raises(UpstreamError, match="'true' cannot be used"):
        async with McpServer.stdio("true"):
            raise AssertionError
    with reserve_port() as reserved, pytest.raises(UpstreamError, match="over HTTP cannot be used"):
        async with McpServer.http(f"http://127.0.0.1:{reserved.getsockname()[1]}/mcp"):
            raise AssertionError


def test_missing_package_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    for make in (lambda: McpServer.stdio("x"), lambda: McpServer.http("http://127.0.0.1")):
        with pytest.raises(ConfigError, match=r"install antiphon\[mcp\]"):
            make()


def test_import_does_not_load_the_mcp_package() -> None:
    code = "import sys, antiphon.tools.mcp; print({'mcp', 'pydantic', 'httpx2'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "set()"
