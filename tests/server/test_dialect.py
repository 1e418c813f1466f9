"""The names of reasoning events: OpenAI's, or those of Open Responses."""

import json
from collections.abc import Iterator

import pytest

from support.live_server import HttpResponse, LiveServer, make_settings
from support.websocket_client import WebSocketClient

SCRIPT = {"default": [{"reasoning": "Hm."}, {"text": "Hello."}]}
OPENAI = ["response.reasoning_text.delta", "response.reasoning_text.done"]
OPEN_RESPONSES = ["response.reasoning.delta", "response.reasoning.done"]


@pytest.fixture
def server() -> Iterator[LiveServer]:
    running = LiveServer(SCRIPT, make_settings())
    yield running
    running.stop()


def names(answer: HttpResponse) -> list[str]:
    lines = [line.removeprefix("data: ") for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    types = [json.loads(line)["type"] for line in lines]
    heads = [line.removeprefix("event: ") for line in answer.body.decode().splitlines() if line.startswith("event: ")]
    assert types == heads
    return [name for name in types if name.startswith("response.reasoning")]


def ask(server: LiveServer, **headers: str) -> HttpResponse:
    body = {"model": "scripted", "input": "hi", "stream": True}
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.ask("POST", "/v1/responses", body, headers=sent)


def test_reasoning_events_use_openai_names_by_default(server: LiveServer) -> None:
    assert names(ask(server)) == OPENAI
    assert names(ask(server, x_antiphon_compat="open-responses")) == OPEN_RESPONSES
    assert names(ask(server, x_antiphon_compat="openai")) == OPENAI


def test_configured_dialect_is_overridden_by_the_request() -> None:
    server = LiveServer(SCRIPT, make_settings(compat="open-responses"))
    try:
        assert names(ask(server)) == OPEN_RESPONSES
        assert names(ask(server, x_antiphon_compat="OpenAI")) == OPENAI
    finally:
        server.stop()


def test_replayed_stream_uses_the_requested_dialect(server: LiveServer) -> None:
    body = {"model": "scripted", "input": "hi", "stream": True, "background": True}
    first = server.ask("POST", "/v1/responses", body)
    assert names(first) == OPENAI
    response_id = json.loads(first.body.decode().splitlines()[1].removeprefix("data: "))["response"]["id"]
    headers = {"x-antiphon-compat": "open-responses"}
    assert names(server.ask("GET", f"/v1/responses/{response_id}?stream=true", headers=headers)) == OPEN_RESPONSES


def test_unknown_dialect_error_names_the_header(server: LiveServer) -> None:
    answer = ask(server, x_antiphon_compat="klingon")
    assert answer.status == 400
    assert answer.json == {
        "error": {
            "message": "The header x-antiphon-compat must be one of: openai, open-responses.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_header",
        }
    }
    assert server.backend.cancelled == 0


def test_response_has_the_served_by_header(server: LiveServer) -> None:
    assert ask(server).headers["x-antiphon-served-by"] == "scripted/scripted"
    whole = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"})
    assert whole.headers["x-antiphon-served-by"] == whole.json["served_by"] == "scripted/scripted"


def test_websocket_uses_the_dialect_of_its_handshake(server: LiveServer) -> None:
    for headers, expected in ({}, OPENAI), ({"x-antiphon-compat": "open-responses"}, OPEN_RESPONSES):
        with WebSocketClient(server, headers=headers) as client:
            client.socket.send(json.dumps({"type": "response.create", "model": "scripted", "input": "hi"}))
            types = [json.loads(client.socket.recv())["type"]]
            while types[-1] != "response.completed":
                types.append(json.loads(client.socket.recv())["type"])
        assert [name for name in types if name.startswith("response.reasoning")] == expected
