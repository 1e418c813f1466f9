"""An engine with hosted tools and a scripted model, and the items that they produce."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from antiphon.backends.base import Turn
from antiphon.engine.policy import Policy
from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.store.base import Store
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.fold import fold
from antiphon.tools.hosted.base import HostedTool
from antiphon.tools.hosted.registry import HostedTools
from support.engine_harness import EngineHarness
from support.recording_backend import RecordingBackend

FILE_SEARCH = {"type": "file_search", "vector_store_ids": ["vs_1"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


def make_call(*queries: str, name: str = "file_search", call_id: str = "call_1") -> dict[str, Any]:
    return {"tool_call": {"name": name, "arguments": {"queries": list(queries)}, "call_id": call_id}}


def make_script(*answers: Any, **options: Any) -> dict[str, Any]:
    """Return a script whose model answers the n-th model call with the n-th answer, and supports only functions."""
    return {"native_tools": ["function"], "rules": [{"answers": list(answers)}]} | options


class HostedHarness(EngineHarness):
    """An engine with hosted tools, whose backend records its turns."""

    def __init__(
        self,
        answers: dict[str, Any],
        tools: HostedTools,
        policy: Policy | None = None,
        *,
        store: Store | None = None,
        backend: RecordingBackend | None = None,
    ) -> None:
        self.recorder = backend or RecordingBackend(answers)
        super().__init__(answers, store or MemoryStore(), policy, tools, self.recorder)

    async def answer(self, input_items: Any = "hi", *, project: str = "default", **fields: Any) -> Response:
        """Return the final response, after checking its stream. Open Responses has no schema for hosted tools."""
        run = await self.ask(input_items, project=project, **fields)
        return fold([event async for batch in run.events() for event in batch])

    @property
    def turns(self) -> list[Turn]:
        return self.recorder.turns


@asynccontextmanager
async def run_engine(
    answers: dict[str, Any],
    *tools: HostedTool,
    store: Store | None = None,
    backend: RecordingBackend | None = None,
    **policy: Any,
) -> AsyncIterator[HostedHarness]:
    harness = HostedHarness(answers, HostedTools(tools), Policy(**policy), store=store, backend=backend)
    await harness.engine.start()
    try:
        yield harness
    finally:
        await harness.engine.close()


def show_items(output: Any) -> list[Any]:
    """Return the items of a response as JSON, without their ids."""
    items = json.loads(codec.encode(output))
    for item in items:
        item.pop("id", None)
    return items


def make_text(message: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": message, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "content": [part], "status": "completed"}


def make_search(*queries: str) -> dict[str, Any]:
    results = [
        {"file_id": "file-1", "filename": "a.txt", "score": 0.5, "text": f"Text about {query}."} for query in queries
    ]
    return {"type": "file_search_call", "queries": list(queries), "status": "completed", "results": results}
