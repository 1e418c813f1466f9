"""llama.cpp's own server with the small model: model list, log probabilities and calls in the history."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.backends.chat_completions.backend import ChatCompletionsBackend, create
from antiphon.protocol import codec
from antiphon.stream.deltas import Delta, Text
from support.llama_server import LlamaServer, open_llama_server

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaServer]:
    with open_llama_server() as server:
        yield server


@pytest.fixture
async def backend(llama: LlamaServer) -> AsyncIterator[ChatCompletionsBackend]:
    made = create("llama", {"base_url": llama.url, "api_key": llama.key, "server": "llama.cpp"}, Path("unused"))
    await made.start()
    yield made
    await made.close()


async def ask(backend: ChatCompletionsBackend, items: Any, **fields: Any) -> list[Delta]:
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    body = {"model": "smollm2-135m", "input": items, "temperature": 0, "max_output_tokens": 40} | fields
    request = codec.decode_request(json.dumps(body).encode()).body
    assert isinstance(request.input, list)
    deltas = await backend.stream(Turn(request=request, items=request.input))
    return [delta for batch in [each async for each in deltas] for delta in batch]


def say(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Text))


async def test_llama_cpp_lists_model_with_context_window(backend: ChatCompletionsBackend, llama: LlamaServer) -> None:
    assert [(model.id, model.context_window) for model in backend.models()] == [("smollm2-135m", llama.context)]


async def test_llama_cpp_sends_logprobs(backend: ChatCompletionsBackend) -> None:
    emitted = await ask(backend, "Say hello.", top_logprobs=2, max_output_tokens=3)
    probable = [logprob for delta in emitted if isinstance(delta, Text) for logprob in delta.logprobs]
    assert [(len(each.top_logprobs), each.logprob <= 0) for each in probable] == [(2, True)] * 3
    assert "".join(each.token for each in probable) == say(emitted)


async def test_llama_cpp_accepts_history_with_calls(backend: ChatCompletionsBackend) -> None:
    history = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "developer", "content": "Be brief."},
        {"type": "function_call", "call_id": "call_a", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_a", "output": "Sunny."},
    ]
    assert say(await ask(backend, history, tools=[WEATHER]))
