"""CPU time of hosted calls in the loop, in this process: a tool that does nothing, and a model that always calls it.

The figures are per hosted call: one model call, the call itself, and the events of its item.
"""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from antiphon.backends.scripted.backend import create
from antiphon.engine.engine import Engine
from antiphon.protocol import codec
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.deltas import CloseItem, Delta, OpenItem
from antiphon.tools.hosted.base import HostedCall, HostedContext, HostedFunction, HostedSession, HostedTool
from antiphon.tools.hosted.registry import HostedTools
from benchmarks.report import Row, make_row

CALLS = 50
SECTION = "CPU of a hosted call, µs"
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
    run = await engine.create(codec.decode_request(body).request, project="default")
    async for _ in run.events():
        pass
