"""Tests of the backend in docs/guides/new-backend.md, extracted from the page and installed as a package."""

import ast
import json
import re
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends import registry
from antiphon.engine.engine import Engine
from antiphon.errors import RateLimited
from antiphon.protocol import codec
from antiphon.protocol.response import Usage
from antiphon.store.memory.store import MemoryStore
from support import engine_harness
from support.replay import cut, replay
from support.upstream_server import Reply, json_of, serve, stream_of

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "new-backend.md"
TEXT = PAGE.read_text("utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
ENTRY, SETTINGS = (tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", TEXT, flags=re.DOTALL))
MODEL = "command-a-03-2025"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": None,
    "parameters": {"type": "object"},
    "strict": None,
}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def send_text(text: str) -> bytes:
    return event("content-delta", index=0, delta={"message": {"content": {"text": text}}})


def send_call(kind: str, **fields: Any) -> bytes:
    return event(kind, index=0, delta={"message": {"tool_calls": fields}})


def send_end(reason: str) -> bytes:
    return event(
        "message-end", delta={"finish_reason": reason, "usage": {"tokens": {"input_tokens": 9.0, "output_tokens": 3.0}}}
    )


CALLING = (
    event("message-start", id="1", delta={"message": {"role": "assistant", "content": []}}),
    send_call("tool-call-start", id="w_1", type="function", function={"name": "get_weather", "arguments": ""}),
    send_call("tool-call-delta", function={"arguments": '{"city":'}),
    send_call("tool-call-delta", function={"arguments": ' "Oslo"}'}),
    send_end("TOOL_CALL"),
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the module of the page and its entry point."""
    points = ENTRY["project"]["entry-points"][registry.GROUP]
    info = tmp_path / "antiphon_cohere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: antiphon_cohere\nVersion: 1.0\n")
    lines = "".join(f"{kind} = {factory}\n" for kind, factory in points.items())
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{lines}")
    (tmp_path / "antiphon_cohere.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    # monkeypatch removes the module from sys.modules after the test.
    monkeypatch.setitem(sys.modules, "antiphon_cohere", None)
    del sys.modules["antiphon_cohere"]


@asynccontextmanager
async def engine_on(url: str) -> AsyncIterator[Engine]:
    settings: dict[str, Any] = dict(SETTINGS["backends"]["cohere"]) | {"base_url": url, "api_key": "key-1"}
    del settings["api_key_env"]
    backend = registry.create(settings.pop("kind"), name="cohere", options=settings, data_dir=Path("unused"))
    engine = Engine(backends={"cohere": backend}, store=MemoryStore())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def ask(engine: Engine, **parameters: Any) -> list[Any]:
    body = codec.encode({"model": MODEL, "stream": True, **parameters})
    run = await engine.create(codec.decode_request(body).body, project="p")
    return [event async for batch in run.events() for event in batch]


@pytest.mark.usefixtures("installed")
async def test_adapter_streams_a_call_and_the_answer_after_it() -> None:
    answer: Reply = stream_of(send_text("It "), send_text("rains."), send_end("COMPLETE"))
    async with serve([stream_of(*CALLING), answer]) as upstream, engine_on(upstream.url) as engine:
        first = engine_harness.judge(await ask(engine, input="Weather?", tools=[TOOL], instructions="Be brief."))
        (called,) = first.output
        output = {"type": "function_call_output", "call_id": called.call_id, "output": "rain"}
        events = await ask(engine, input=[output], previous_response_id=first.id, tools=[TOOL])
        before, after = (request.json["messages"] for request in upstream.requests)
        request = upstream.requests[0]
    assert (called.call_id, called.name, called.arguments) == ("w_1", "get_weather", '{"city": "Oslo"}')
    assert (request.path, request.headers["authorization"]) == ("/v1/chat", "Bearer key-1")
    described = {"name": "get_weather", "description": "", "parameters": {"type": "object"}}
    assert request.json["tools"] == [{"type": "function", "function": described}]
    assert before == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert after == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"id": "w_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "w_1", "content": "rain"},
    ]
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["It ", "rains."]
    last = engine_harness.judge(events)
    assert (last.output_text, last.usage) == ("It rains.", Usage(9, 3, 12))


@pytest.mark.usefixtures("installed")
async def test_adapter_calls_become_custom_tool_calls() -> None:
    patch = (
        send_call("tool-call-start", id="p_1", type="function", function={"name": "note", "arguments": ""}),
        send_call("tool-call-delta", function={"arguments": '{"input": "free text"}'}),
        send_end("TOOL_CALL"),
    )
    async with serve([stream_of(*patch)]) as upstream, engine_on(upstream.url) as engine:
        *_, last = await ask(engine, input="Note it.", tools=[{"type": "custom", "name": "note"}])
    (called,) = last.response.output
    assert (called.type, called.input) == ("custom_tool_call", "free text")


@pytest.mark.usefixtures("installed")
async def test_adapter_upstream_errors_become_api_errors() -> None:
    refusal = json_of({"message": "Too many."}, 429, Retry_After="9999")
    async with serve([refusal] * 9) as upstream, engine_on(upstream.url) as engine:
        with pytest.raises(RateLimited, match="Too many"):
            await ask(engine, input="Hi", stream=False)


@pytest.mark.usefixtures("installed")
def test_adapter_reader_accepts_any_chunk_boundary() -> None:
    from antiphon_cohere import Reader

    raw = b"".join(CALLING)
    whole = replay(Reader, [raw])
    assert all(replay(Reader, cut(raw, position)) == whole for position in range(1, len(raw)))


def test_adapter_and_page_are_short() -> None:
    lines = [line for line in CODE.splitlines() if line.strip()]
    assert ast.parse(CODE)
    assert len(lines) <= 70
    assert len(TEXT.splitlines()) <= 170


def test_page_links_to_existing_files() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT)
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
