"""llama.cpp's own server, spoken to as one that speaks Responses: a real upstream with a real model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from antiphon.backends.responses.backend import create
from support.live_server import Running, make_settings
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
    server = Running({}, make_settings(), backend=backend)
    with server.client() as client:
        yield client
    server.stop()


def ask(client: OpenAI, input: Any, **more: Any) -> Any:
    asked = {"model": "smollm2-135m", "temperature": 0, "max_output_tokens": 16} | more
    return client.responses.create(input=input, **asked)


def test_its_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]


def test_it_answers_with_its_usage(client: OpenAI) -> None:
    response = ask(client, "Say hello.")
    assert response.status == "completed"
    assert response.output_text
    assert response.usage.input_tokens > 0
    assert response.usage.output_tokens > 0


def test_it_streams(client: OpenAI) -> None:
    asked: Any = {"model": "smollm2-135m", "temperature": 0, "max_output_tokens": 16}
    with client.responses.stream(input="Say hello.", **asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert len(pieces) > 1
    assert "".join(pieces) == response.output_text


def test_it_goes_on_with_what_was_said(client: OpenAI) -> None:
    first = ask(client, "Say hello.", instructions="You are brief.")
    second = ask(client, "And now goodbye.", previous_response_id=first.id)
    assert second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens


def test_it_reads_a_call_and_its_output(client: OpenAI) -> None:
    items = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city":"Oslo"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    assert ask(client, items, tools=[WEATHER]).output


def test_what_it_refuses_is_told_in_its_words(client: OpenAI) -> None:
    with pytest.raises(Exception, match="context") as caught:
        ask(client, "word " * 3000)
    assert getattr(caught.value, "code", None) == "context_length_exceeded"


def test_tokens_are_counted_one_way_or_the_other(client: OpenAI) -> None:
    assert client.responses.input_tokens.count(model="smollm2-135m", input="one two three").input_tokens > 3
