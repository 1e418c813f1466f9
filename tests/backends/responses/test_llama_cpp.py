"""The backend with llama.cpp's own server: a real upstream with a real model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from antiphon.backends.responses.backend import create
from support.live_server import LiveServer, make_settings
from support.llama_server import LlamaServer, open_llama_server

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaServer]:
    with open_llama_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(llama: LlamaServer) -> Iterator[OpenAI]:
    options = {"base_url": llama.url, "api_key": llama.key, "request_retries": 0, "stream_retries": 0}
    backend: Any = create("llama", options, Path("unused"))
    server = LiveServer({}, make_settings(), backend=backend)
    with server.client() as client:
        yield client
    server.stop()


def respond(client: OpenAI, input: Any, **more: Any) -> Any:
    parameters = {"model": "smollm2-135m", "temperature": 0, "max_output_tokens": 16} | more
    return client.responses.create(input=input, **parameters)


def test_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]


def test_answer_has_text_and_usage(client: OpenAI) -> None:
    response = respond(client, "Say hello.")
    assert response.status == "completed"
    assert response.output_text
    assert response.usage.input_tokens > 0
    assert response.usage.output_tokens > 0


def test_answer_is_streamed(client: OpenAI) -> None:
    parameters: Any = {"model": "smollm2-135m", "temperature": 0, "max_output_tokens": 16}
    with client.responses.stream(input="Say hello.", **parameters) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert len(pieces) > 1
    assert "".join(pieces) == response.output_text


def test_previous_response_is_part_of_the_context(client: OpenAI) -> None:
    first = respond(client, "Say hello.", instructions="You are brief.")
    second = respond(client, "And now goodbye.", previous_response_id=first.id)
    assert second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens


def test_call_and_output_are_accepted(client: OpenAI) -> None:
    items = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city":"Oslo"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    assert respond(client, items, tools=[WEATHER]).output


def test_too_long_input_is_context_length_exceeded(client: OpenAI) -> None:
    with pytest.raises(Exception, match="context") as caught:
        respond(client, "word " * 3000)
    assert getattr(caught.value, "code", None) == "context_length_exceeded"


def test_tokens_are_counted_or_estimated(client: OpenAI) -> None:
    assert client.responses.input_tokens.count(model="smollm2-135m", input="one two three").input_tokens > 3
