"""The recorded streams through the whole engine: sealed, kept, read again, and gone on from."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.responses.backend import create
from antiphon.engine.engine import Engine
from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.store.memory.store import MemoryStore
from support.upstream_server import Reply, UpstreamServer, serve, stream_of

CORPUS = Path(__file__).parents[2] / "wire" / "responses"
EXPECTED = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(CORPUS.glob("*.json"))}
FINISHED = [name for name, expected in EXPECTED.items() if expected["status"] != "failed"]


def recorded(name: str) -> Reply:
    return stream_of((CORPUS / f"{name}.sse").read_bytes())


@asynccontextmanager
async def engine_on(*names: str) -> AsyncIterator[tuple[Engine, UpstreamServer]]:
    async with serve([recorded(name) for name in names]) as upstream:
        options = {"base_url": upstream.url, "models": ["m"], "request_retries": 0, "stream_retries": 0}
        engine = Engine(backends={"up": create("up", options, Path("unused"))}, store=MemoryStore())
        await engine.start()
        try:
            yield engine, upstream
        finally:
            await engine.close()


async def ask(engine: Engine, **fields: Any) -> Response:
    body = {"model": "m", "input": "hi", "tools": [{"type": "function", "name": "f"}]} | fields
    run = await engine.create(codec.decode_request(json.dumps(body).encode()).request, project="p")
    async for _ in run.events():
        pass
    return await engine.retrieve("p", run.response.id)


def read(items: Any) -> list[dict[str, Any]]:
    """Items without what is made anew each time."""
    plain: list[dict[str, Any]] = json.loads(codec.encode(items))
    return [{name: item[name] for name in item if name not in ("id", "encrypted_content")} for item in plain]


@pytest.mark.parametrize("name", FINISHED)
async def test_what_was_kept_is_what_was_told(name: str) -> None:
    async with engine_on(name) as (engine, _):
        kept = await ask(engine)
    assert kept.status == EXPECTED[name]["status"]
    assert read(kept.output) == read(EXPECTED[name]["output"])


@pytest.mark.parametrize("name", ["new_fields", "reasoning_summary_and_seal", "only_completed"])
async def test_what_the_upstream_has_sealed_comes_back_to_it_and_is_nobody_elses_to_read(name: str) -> None:
    async with engine_on(name, "text") as (engine, upstream):
        first = await ask(engine, reasoning={"effort": "low"})
        told = codec.encode(first.output)
        calls = (
            [{"type": "function_call_output", "call_id": "call_a", "output": "7"}]
            if name != "reasoning_summary_and_seal"
            else []
        )
        await ask(engine, previous_response_id=first.id, input=[*calls, {"role": "user", "content": "and now?"}])
        sent = upstream.requests[1].json["input"]
    assert b"opaque" not in told
    theirs = [item["encrypted_content"] for item in EXPECTED[name]["output"] if "encrypted_content" in item]
    assert [item["encrypted_content"] for item in sent if item["type"] == "reasoning"] == theirs
