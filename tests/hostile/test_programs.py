"""Programs of programmatic_tool_calling that take all they can get. Each fails, or is cut off, on its own."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.loop_blocks import MAX_BLOCK
from support.victim import Victim

pytest.importorskip("py_mini_racer")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

TIME = "ran longer than 1 seconds"
MEMORY = "needs more memory"
UNSETTLED = "a promise that nothing settles"
BROKEN = "broke its environment"

PROGRAMS = {
    "endless": ("while (true) {}", TIME),
    "heap": ("const a = []; while (true) a.push(new Array(100000).fill({}));", ""),
    "buffers": ("const a = []; while (true) a.push(new ArrayBuffer(50000000));", "allocation failed"),
    "string": ("let s = 'x'; while (true) s += s;", "Invalid string length"),
    "regex": ("/^(a+)+$/.test('a'.repeat(40) + 'b')", TIME),
    "recursion": ("function f() { return f() + 1 } f();", "call stack"),
    "nested": ("let o = {}; for (let i = 0; i < 1000000; i++) o = {o}; text(o);", ""),
    "microtasks": ("function f() { return Promise.resolve().then(f) } await f();", ""),
    "arguments": ("tools.get({n: 'z'.repeat(20000000)}); await new Promise(() => {});", UNSETTLED),
    "unsettled": ("await new Promise(() => {});", UNSETTLED),
    "pollution": ("Object.prototype.toJSON = () => 1; JSON.stringify = () => '['.repeat(60000000); text('a');", BROKEN),
    "forged": (
        "JSON.parse = () => { while (true) {} }; Promise.prototype.then = function () { return this }; text(1);",
        UNSETTLED,
    ),
}
FLOODS = {
    "flood": "for (let i = 0; i < 20000; i++) text('y'.repeat(1000));",
    "calls": "for (let i = 0; i < 10000; i++) tools.get({n: i}); await new Promise(() => {});",
}
TOOLS = [
    {"type": "programmatic_tool_calling"},
    {
        "type": "function",
        "name": "get",
        "parameters": {"type": "object", "properties": {"n": {}}},
        "allowed_callers": ["programmatic"],
    },
]
FAST = ("pollution", "unsettled")


def make_rule(user: str, code: str) -> dict[str, Any]:
    call = {"name": "programmatic_tool_calling", "arguments": {"code": code}, "call_id": "call_1"}
    return {"user": user, "answers": [[{"tool_call": call}]]}


def start(folder: Path, **programs: Any) -> Victim:
    codes = {name: code for name, (code, _) in PROGRAMS.items()} | FLOODS
    rules = [{"last_item": "function_call_output", "answers": ["Done."]}, *map(make_rule, codes, codes.values())]
    script = {"native_tools": ["function"], "rules": rules}
    return Victim(folder, script=script, programs=programs)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    started = start(tmp_path_factory.mktemp("programs"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server for programs that use all their time. On a busy machine, any program may take a second."""
    started = start(tmp_path_factory.mktemp("hasty"), seconds=1)
    yield started
    started.stop()


def run(server: Victim, name: str) -> list[dict[str, Any]]:
    """Run a program and return the output of the response. The memory and the event loop stay bounded."""
    before = server.rss_mb()
    server.reset_peak()
    response = server.ask("POST", "/v1/responses", {"model": "scripted", "input": name, "tools": TOOLS})
    assert response.status == 200, response.json
    assert server.peak_mb() < before + 40
    assert server.longest_block() < MAX_BLOCK
    output: list[dict[str, Any]] = response.json["output"]
    return output


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_hostile_program_fails_and_the_response_goes_on(request: pytest.FixtureRequest, name: str) -> None:
    server: Victim = request.getfixturevalue("hasty" if PROGRAMS[name][1] in (TIME, "") else "server")
    _, output, message = run(server, name)
    assert (output["type"], output["status"], message["type"]) == ("program_output", "incomplete", "message")
    assert PROGRAMS[name][1] in output["result"]


def test_output_of_a_flooding_program_is_cut_off(server: Victim) -> None:
    _, output, _ = run(server, "flood")
    assert (output["status"], len(output["result"]) < 257 * 1024) == ("completed", True)


def test_calls_of_a_program_are_limited(server: Victim) -> None:
    items = run(server, "calls")
    assert [item["type"] for item in items] == ["program", *["function_call"] * 256]
