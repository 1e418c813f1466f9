"""The usage of requests whose client leaves before the upstream answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.chat_completions.backend import create as create_chat
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.engine.respond.run import Run
from antiphon.protocol import codec
from antiphon.store.memory.store import MemoryStore
from antiphon.store.usage import MINUTE
from support.upstream_server import STALL, Reply, UpstreamServer, stream_of
from support.upstream_server import serve as serve_upstream


@asynccontextmanager
async def run_on_upstream(*replies: Reply, **options: Any) -> AsyncIterator[tuple[Engine, UpstreamServer]]:
    """Run an engine whose upstream does not answer after these replies."""
    async with serve_upstream([*replies, *[Reply(raw=STALL)] * 2]) as server:
        backend = create_chat("up", {"base_url": server.url, "models": ["big"], **options}, Path())
        engine = Engine(backends={"up": backend}, store=MemoryStore(), policy=Policy(models={"fast": ("up/big",)}))
        await engine.start()
        yield engine, server
        await engine.close()


@pytest.mark.parametrize("operation", ["create", "compact"])
async def test_request_whose_client_leaves_before_the_answer_is_counted(operation: str) -> None:
    request = codec.decode_request(codec.encode({"model": "fast", "input": "a question of some length"})).body
    async with run_on_upstream() as (engine, server):
        calling = asyncio.create_task(getattr(engine, operation)(request, project="p"))
        await server.until_requests(1)
        calling.cancel()
        await asyncio.wait({calling})
        await engine.usage.close()
        (row,) = await engine.admin_store.list_usage(0, 2**40, width=MINUTE)
    assert (row.model, row.requests, row.input_tokens > 5, row.output_tokens) == ("big", 1, True, 0)


async def test_compaction_whose_client_leaves_during_the_summary_is_counted() -> None:
    history = [{"role": role, "content": "word " * 400} for role in ("user", "assistant")] * 10
    request = codec.decode_request(codec.encode({"model": "fast", "input": history})).body
    async with run_on_upstream(context_window=8000) as (engine, server):
        calling = asyncio.create_task(engine.compact(request, project="p"))
        await server.until_requests(1)
        calling.cancel()
        await asyncio.wait({calling})
        await engine.usage.close()
        (row,) = await engine.admin_store.list_usage(0, 2**40, width=MINUTE)
    assert "You write the notes" in server.requests[0].json["messages"][0]["content"]
    assert (row.model, row.requests, row.input_tokens > 5000, row.output_tokens) == ("big", 1, True, 0)


async def test_request_whose_client_leaves_the_queue_of_an_upstream_is_not_counted() -> None:
    request = codec.decode_request(codec.encode({"model": "fast", "input": "hi"})).body
    async with run_on_upstream(max_concurrent=1) as (engine, server):
        first, second = (asyncio.create_task(engine.create(request, project=name)) for name in ("p", "q"))
        await server.until_requests(1)
        second.cancel()
        await asyncio.wait({second})
        first.cancel()
        await asyncio.wait({first})
        await engine.usage.close()
        assert [row.project for row in await engine.admin_store.list_usage(0, 2**40, width=MINUTE)] == ["p"]


async def test_stream_whose_client_leaves_the_queue_of_an_upstream_is_not_counted() -> None:
    body = {"model": "fast", "input": "hi", "stream": True}
    request = codec.decode_request(codec.encode(body)).body
    async with run_on_upstream(max_concurrent=1) as (engine, server):
        first, second = [await engine.create(request, project=name) for name in ("p", "q")]
        await server.until_requests(1)
        for run in (second, first):
            assert isinstance(run, Run)
            run.cancel()
            await run.drain()
        await engine.usage.close()
        assert [row.project for row in await engine.admin_store.list_usage(0, 2**40, width=MINUTE)] == ["p"]


async def test_second_call_of_a_response_is_not_counted_before_it_leaves_the_queue() -> None:
    search = {"index": 0, "id": "call_1", "function": {"name": "tool_search", "arguments": '{"query":"weather"}'}}
    weather = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "defer_loading": True}
    body = {"model": "fast", "input": "hi", "stream": True}
    searching = codec.decode_request(codec.encode(body | {"tools": [{"type": "tool_search"}, weather]})).body
    other = codec.decode_request(codec.encode(body)).body
    gate = asyncio.Event()
    chunks = [
        {"choices": [{"delta": {"tool_calls": [search]}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 10}},
    ]
    first, last = [b"data: %b\n\n" % codec.encode(chunk) for chunk in chunks]
    async with run_on_upstream(stream_of(first, gate, last), max_concurrent=1) as (engine, server):
        runs = [await engine.create(request, project=name) for request, name in ((searching, "p"), (other, "q"))]
        draining = [asyncio.create_task(run.drain()) for run in runs]
        await server.until_requests(1)
        gate.set()
        await server.until_requests(2)
        for run in runs:
            assert isinstance(run, Run)
            run.cancel()
        await asyncio.wait(draining)
        await engine.usage.close()
        rows = await engine.admin_store.list_usage(0, 2**40, width=MINUTE)
    assert [(row.project, row.requests, row.input_tokens) for row in rows if row.project == "p"] == [("p", 1, 100)]
