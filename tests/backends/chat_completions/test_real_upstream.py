"""Antiphon in front of llama.cpp's own HTTP server, over Chat Completions, with the real model and the real SDK."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, BadRequestError, OpenAI

from antiphon.backends.chat_completions.backend import create
from antiphon.backends.responses.backend import create as create_responses
from support.live_server import LiveServer, make_settings
from support.llama_server import LlamaServer, open_llama_server

MODEL = "smollm2-135m"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaServer]:
    with open_llama_server() as server:
        yield server


def start(llama: LlamaServer, **options: Any) -> LiveServer:
    backend: Any = create("upstream", {"base_url": llama.url, "api_key": llama.key} | options, Path("unused"))
    return LiveServer({}, make_settings(), backend=backend)


@pytest.fixture(scope="module")
def running(llama: LlamaServer) -> Iterator[LiveServer]:
    running = start(llama)
    yield running
    running.stop()


@pytest.fixture
def client(running: LiveServer) -> Iterator[OpenAI]:
    with running.client() as client:
        yield client


def test_real_upstream_models_are_listed(client: OpenAI) -> None:
    assert [(model.id, model.owned_by) for model in client.models.list().data] == [(MODEL, "llamacpp")]


def test_real_upstream_answers(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16, temperature=0)
    assert response.status in ("completed", "incomplete")
    assert response.output_text
    assert response.usage is not None
    assert response.usage.input_tokens > 10
    assert 1 <= response.usage.output_tokens <= 16


def test_real_upstream_streams_deltas(client: OpenAI) -> None:
    requested = {"model": MODEL, "input": "Count from one to ten.", "max_output_tokens": 16, "temperature": 0}
    with client.responses.create(stream=True, **requested) as stream:
        *events, last = list(stream)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 5
    assert last.type == "response.incomplete"
    assert last.response.output_text == "".join(pieces)
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_real_upstream_gets_the_history(client: OpenAI) -> None:
    requested = {"model": MODEL, "max_output_tokens": 16, "temperature": 0}
    first = client.responses.create(input="My name is Ada.", **requested)
    alone = client.responses.create(input="What is my name?", **requested)
    second = client.responses.create(input="What is my name?", previous_response_id=first.id, **requested)
    assert second.usage is not None
    assert alone.usage is not None
    assert second.usage.input_tokens > alone.usage.input_tokens + 5


def test_real_upstream_follows_the_schema(client: OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL,
        input="Ada is 36 years old.",
        max_output_tokens=60,
        temperature=0,
        text={"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}},
    )
    payload = json.loads(answer.output_text)
    assert (sorted(payload), type(payload["age"])) == (["age", "name"], int)


def test_real_upstream_rejects_a_long_context(client: OpenAI, llama: LlamaServer) -> None:
    with pytest.raises(BadRequestError) as raised:
        client.responses.create(model=MODEL, input="word " * 2 * llama.context)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input")


def test_client_disconnect_stops_the_real_model(client: OpenAI) -> None:
    # The server has one slot: it answers again only when the first answer was given up.
    with client.responses.stream(model=MODEL, input="Tell a long story.", max_output_tokens=900) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    assert client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16).output_text


def test_wrong_upstream_key_is_a_server_error_without_the_key(llama: LlamaServer) -> None:
    running = start(llama, api_key="sk-wrong-0123456789", models=[MODEL])
    try:
        with running.client() as client, pytest.raises(APIStatusError) as raised:
            client.responses.create(model=MODEL, input="Say hello.")
    finally:
        running.stop()
    assert (raised.value.status_code, raised.value.code) == (502, "upstream_authentication")
    assert raised.value.body == {
        "message": "The upstream rejected this server's API key or its permissions: Invalid API Key",
        "type": "server_error",
        "param": None,
        "code": "upstream_authentication",
    }


def test_server_can_serve_another_antiphon_server(running: LiveServer) -> None:
    backend: Any = create_responses("inner", {"base_url": f"{running.url}/v1"}, Path("unused"))
    front = LiveServer({}, make_settings(), backend=backend)
    requested = {"model": MODEL, "max_output_tokens": 16, "temperature": 0}
    try:
        with front.client() as client:
            first = client.responses.create(input="My name is Ada.", **requested)
            with client.responses.create(
                input="What is my name?", previous_response_id=first.id, stream=True, **requested
            ) as stream:
                *events, last = list(stream)
    finally:
        front.stop()
    assert last.type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in [*events, last]] == list(range(len(events) + 1))
    assert last.response.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    assert last.response.usage.input_tokens > first.usage.input_tokens + 5
