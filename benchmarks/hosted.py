"""Cost of hosted calls in the loop: the CPU time of a tool that does nothing, and the time of calls to other processes.

The model always calls the tool. The figures are per hosted call: one model call, the call itself, and the events of its
item. An MCP server over loopback and the process of a program take much longer, so their figures are wall-clock times.
"""

import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from antiphon.backends.scripted.backend import create
from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.protocol import codec
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.deltas import CloseItem, Delta, OpenItem
from antiphon.tools.hosted.base import (
    HostedCall,
    HostedContext,
    HostedFunction,
    HostedSession,
    HostedSetup,
    HostedTool,
)
from antiphon.tools.hosted.registry import HostedTools, create_hosted_tools
from antiphon.upstream.addresses import OutboundRules
from benchmarks.report import Row, make_row

CALLS = 50
PROGRAMS = 5
SECTION = "CPU of a hosted call, µs"
TIME_SECTION = "time of a hosted call, ms"
_CALL = [{"tool_call": {"name": "empty", "arguments": "{}"}}]


class EmptyTool(HostedTool):
    """A tool that does nothing."""

    types = frozenset({"empty"})

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        return _Session()


class _Session(HostedSession):
    functions = (HostedFunction(name="empty", description="", parameters={"type": "object", "properties": {}}),)

    def begin(self, name: str, key: str) -> HostedCall:
        return _Call(key)


class _Call(HostedCall):
    def __init__(self, key: str) -> None:
        self._key = key

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        yield [OpenItem(self._key, _make_item("in_progress"), "empty"), CloseItem(self._key, _make_item("completed"))]


def _make_item(status: str) -> Unknown:
    return Unknown(json.dumps({"type": "empty_call", "id": "", "status": status}).encode())


async def measure(folder: Path, *, rounds: int) -> list[Row]:
    """Return the rows of the report."""
    stores: dict[str, Store] = {"in memory": MemoryStore(), "SQLite": SqliteStore(folder / "hosted.db")}
    samples: dict[str, dict[str, list[float]]] = {}
    for name, store in stores.items():
        for background in (False, True):
            mode = "background" if background else "foreground"
            samples[f"{mode}, {name}"] = {"antiphon": await _measure(store, background=background, rounds=rounds)}
    return [make_row(SECTION, name, found) for name, found in samples.items()]


async def measure_processes(folder: Path, *, rounds: int) -> list[Row]:
    """Return the rows of calls to other processes, as far as their packages are installed."""
    samples: dict[str, list[float]] = {}
    if find_spec("mcp") is not None:
        with _run_mcp_server() as url:
            entry = {"type": "mcp", "server_label": "empty", "server_url": url, "require_approval": "never"}
            samples["MCP server over loopback, empty tool"] = await _time_calls(folder, entry, _CALL, CALLS, rounds)
    if find_spec("py_mini_racer") is not None:
        call = [{"tool_call": {"name": "programmatic_tool_calling", "arguments": {"code": ""}}}]
        entry = {"type": "programmatic_tool_calling"}
        samples["empty program"] = await _time_calls(folder, entry, call, PROGRAMS, rounds)
    return [make_row(TIME_SECTION, name, {"antiphon": found}) for name, found in samples.items()]


@contextmanager
def _run_mcp_server() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.mcp_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


async def _time_calls(folder: Path, entry: dict[str, Any], call: Any, calls: int, rounds: int) -> list[float]:
    rules = [{"user": "First", "answers": [call, "Done."]}, {"answers": [*([call] * calls), "Done."]}]
    script = {"native_tools": ["function"], "rules": rules}
    found: list[float] = []
    for _ in range(rounds):
        model = create("model", {"script": script}, Path())
        tools = create_hosted_tools(HostedSetup(settings=Settings(data_dir=folder, store="memory:")))
        policy = Policy(outbound=OutboundRules.parse(["127.0.0.1"]))
        engine = Engine(backends={"model": model}, store=MemoryStore(), hosted_tools=tools, policy=policy)
        await engine.start()
        await _ask(engine, input="First.", tools=[entry])  # imports and the connection
        began = time.perf_counter()
        await _ask(engine, tools=[entry])
        found.append((time.perf_counter() - began) / calls * 1e3)
        await engine.close()
    return found


async def _measure(store: Store, *, background: bool, rounds: int) -> list[float]:
    script = {"native_tools": ["function"], "rules": [{"answers": [*([_CALL] * CALLS), "Done."]}]}
    found: list[float] = []
    for _ in range(rounds):
        model = create("model", {"script": script}, Path())
        engine = Engine(backends={"model": model}, store=store, hosted_tools=HostedTools([EmptyTool()]))
        await engine.start()
        await _ask(engine, tools=[])  # one answer of the script, and all lazy imports
        began = time.process_time()
        await _ask(engine, tools=[{"type": "empty"}], background=background)
        found.append((time.process_time() - began) / (CALLS - 1) * 1e6)
        await engine.close()
    return found


async def _ask(engine: Engine, **fields: Any) -> None:
    body = codec.encode({"model": "scripted", "input": "Go."} | fields)
    run = await engine.create(codec.decode_request(body).body, project="default")
    async for _ in run.events():
        pass
