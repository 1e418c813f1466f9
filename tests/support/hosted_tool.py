"""A hosted tool for tests that records each effect. It serves `file_search`, or the type `record` of a third party.

In process, a test passes it to the engine. A server process finds it by the entry point that `install` writes; it then
serves `record` and appends its effects to the file `effects` in the folder of `HOSTED_TEST_FOLDER`.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

from antiphon.errors import InvalidRequest
from antiphon.protocol.hosted import FileSearchCall, FileSearchResult
from antiphon.protocol.tools import FileSearchTool, Tool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import CloseItem, Delta, ItemPassthrough, OpenItem
from antiphon.tools.hosted.base import (
    HostedCall,
    HostedContext,
    HostedFunction,
    HostedSession,
    HostedSetup,
    HostedTool,
    OpeningCall,
)

FOLDER = "HOSTED_TEST_FOLDER"
PARAMETERS = {
    "type": "object",
    "properties": {"queries": {"type": "array", "items": {"type": "string"}}},
    "required": ["queries"],
}

WEB_SEARCH_TYPES = ("web_search", "web_search_preview", "web_search_preview_2025_03_11")

Kind = Literal["file_search", "code_interpreter", "image_generation", "web_search", "record"]


class RecordingTool(HostedTool):
    """Records its effects in `effects`, and in a file of `folder` if there is one.

    While the folder has a file `hold`, queries that begin with `before` or `after` stop for ever before or after their
    effect, and write a file `held-QUERY`. In process, `gate` stops a call before its effect. Calls whose arguments
    contain `repeatable` are repeatable. `introduced` are the deltas before the first model call.
    """

    def __init__(self, kind: Kind = "file_search", *, folder: Path | None = None) -> None:
        self.kind = kind
        self.types = frozenset(WEB_SEARCH_TYPES if kind == "web_search" else {kind})
        self.effects: list[str] = []
        self.opened: list[HostedContext] = []
        self.introduced: Sequence[Delta] = ()
        self.closed = 0
        self.gate: asyncio.Event | None = None
        self.reached = asyncio.Event()
        self._folder = folder

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        if isinstance(tool, FileSearchTool) and "vs_unknown" in tool.vector_store_ids:
            raise InvalidRequest("Vector store with id 'vs_unknown' not found.", param="tools[0].vector_store_ids[0]")
        self.opened.append(context)
        return _Session(self)

    async def perform(self, query: str) -> None:
        """Have the effect of a call."""
        self.reached.set()
        if self.gate is not None:
            await self.gate.wait()
        await self.hold("before", query)
        self.effects.append(query)
        if self._folder is not None:
            with (self._folder / "effects").open("a") as file:
                file.write(f"{query}\n")

    async def hold(self, position: str, query: str) -> None:
        if self._folder is not None and query.startswith(position) and (self._folder / "hold").exists():
            (self._folder / f"held-{query}").touch()
            await asyncio.Event().wait()


class _Session(HostedSession):
    def __init__(self, tool: RecordingTool) -> None:
        self._tool = tool
        self.functions = [HostedFunction(name=tool.kind, description="Searches the files.", parameters=PARAMETERS)]

    async def introduce(self) -> AsyncGenerator[Sequence[Delta], None]:
        yield self._tool.introduced

    def begin(self, name: str, key: str) -> HostedCall:
        assert name == self._tool.kind
        return _Call(self._tool, key)

    async def close(self) -> None:
        self._tool.closed += 1


class _Call(OpeningCall):
    def __init__(self, tool: RecordingTool, key: str) -> None:
        super().__init__(key)
        self._tool = tool
        self._arguments = ""

    @property
    def is_repeatable(self) -> bool:
        return "repeatable" in self._arguments

    def write(self, fragment: str) -> Sequence[Delta]:
        self._arguments += fragment
        return self.open()

    def make_opening(self) -> list[Delta]:
        return [OpenItem(self.key, self._make_item("in_progress", []), "fs"), self._make_event("in_progress")]

    def _make_item(
        self, status: Literal["in_progress", "completed", "failed"], queries: list[str], texts: Sequence[str] = ()
    ) -> FileSearchCall | Unknown:
        if self._tool.kind == "file_search":
            results = [FileSearchResult(file_id="file-1", filename="a.txt", text=text, score=0.5) for text in texts]
            return FileSearchCall(queries, "", status, results or None)
        fields = {"type": "record_call", "id": "", "status": status, "queries": queries, "texts": list(texts)}
        return Unknown(json.dumps(fields).encode())

    def _make_event(self, name: str) -> Delta:
        fields = {"type": f"response.{self._tool.kind}_call.{name}", "item_id": "", "output_index": 0}
        return ItemPassthrough(Unknown(json.dumps(fields | {"sequence_number": 0}).encode()), self.key)

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        yield [*self.open(), self._make_event("searching")]
        queries = json.loads(arguments)["queries"]
        if "explode" in queries:
            raise RuntimeError("boom")
        for query in queries:
            await self._tool.perform(query)
        yield [self._make_event("completed")]
        for query in queries:
            await self._tool.hold("after", query)
        texts = [f"Text about {query}." for query in queries]
        yield [CloseItem(self.key, self._make_item("completed", queries, texts))]

    def fail(self, message: str) -> Sequence[Delta]:
        return [*self.open(), CloseItem(self.key, self._make_item("failed", [], [message]))]


def create(setup: HostedSetup) -> HostedTool:
    """Create the tool of a server process."""
    return RecordingTool("record", folder=Path(os.environ[FOLDER]))


def install(folder: Path) -> dict[str, str]:
    """Write a package with the entry point of the tool. Return the environment of a server process that has it."""
    info = folder / "hosted_test_tool-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hosted-test-tool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[antiphon.hosted_tools]\nrecording = support.hosted_tool:create\n")
    tests = Path(__file__).parents[1]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(tests)]), FOLDER: str(folder)}
