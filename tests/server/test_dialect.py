"""The dialects: the names of reasoning events, and the schema of the text format."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.store.location import locate_store
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


SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TEXT = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
ECHO = TEXT["format"] | {"description": None}
OPEN_RESPONSES_HEADER = {"x-antiphon-compat": "open-responses"}


def formats(body: bytes) -> list[object]:
    """Return the text formats of all responses in an event stream."""
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    return [event["response"]["text"]["format"] for event in events if "response" in event]


@pytest.fixture
def structured() -> Iterator[LiveServer]:
    running = LiveServer({"default": [{"text": '{"text": "json_schema"}'}]}, make_settings())
    yield running
    running.stop()


def test_schema_is_echoed_in_the_openai_dialect_only(structured: LiveServer) -> None:
    body = {"model": "scripted", "input": "hi", "text": TEXT}
    without = ECHO | {"schema": None}
    whole = structured.ask("POST", "/v1/responses", body)
    assert whole.json["text"]["format"] == ECHO
    adapted = structured.ask("POST", "/v1/responses", body, headers=OPEN_RESPONSES_HEADER)
    assert adapted.json["text"]["format"] == without
    for headers, expected in ({}, ECHO), (OPEN_RESPONSES_HEADER, without):
        streamed = structured.ask("POST", "/v1/responses", body | {"stream": True}, headers=headers)
        assert formats(streamed.body) == [expected] * 3
        with WebSocketClient(structured, headers=headers) as client:
            client.send({"type": "response.create"} | body)
            received = client.finish()
        assert [each["response"]["text"]["format"] for each in received if "response" in each] == [expected] * 3


@pytest.mark.parametrize("created_in", [{}, OPEN_RESPONSES_HEADER])
def test_stored_response_has_the_schema_of_each_reader(structured: LiveServer, created_in: dict[str, str]) -> None:
    body = {"model": "scripted", "input": "hi", "text": TEXT, "background": True, "stream": True}
    first = structured.ask("POST", "/v1/responses", body, headers=created_in)
    events = [json.loads(line[6:]) for line in first.body.decode().splitlines() if line.startswith("data: {")]
    path = f"/v1/responses/{events[0]['response']['id']}"
    for headers, expected in ({}, ECHO), (OPEN_RESPONSES_HEADER, ECHO | {"schema": None}):
        assert structured.ask("GET", path, headers=headers).json["text"]["format"] == expected
        assert structured.ask("POST", f"{path}/cancel", headers=headers).json["text"]["format"] == expected
        for query in "?stream=true", "?stream=true&include[]=reasoning.encrypted_content":
            followed = structured.ask("GET", path + query, headers=headers)
            assert formats(followed.body) == [expected] * (len(formats(first.body)))
    numbered = [json.loads(line[6:]) for line in followed.body.decode().splitlines() if line.startswith("data: {")]
    assert [each["sequence_number"] for each in numbered] == [each["sequence_number"] for each in events]


def test_server_with_another_dialect_reads_the_same_store(tmp_path: Path) -> None:
    for stored_in, read_in in ("open-responses", "openai"), ("openai", "open-responses"):
        location = f"sqlite:///{tmp_path}/{stored_in}.db"
        body = {"model": "scripted", "input": "hi", "text": TEXT}
        found = []
        for compat in (stored_in, read_in):
            script = {"default": [{"text": '{"text": "hi"}'}]}
            running = LiveServer(script, make_settings(compat=compat), locate_store(location))
            try:
                if not found:
                    found.append(running.ask("POST", "/v1/responses", body).json)
                else:
                    found.append(running.ask("GET", f"/v1/responses/{found[0]['id']}").json)
            finally:
                running.stop()
        schemas = {"openai": SCHEMA, "open-responses": None}
        assert [each["text"]["format"]["schema"] for each in found] == [schemas[stored_in], schemas[read_in]]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel")])
def test_unknown_dialect_is_refused_when_a_response_is_read(server: LiveServer, method: str, path: str) -> None:
    answer = server.ask(method, path, headers={"x-antiphon-compat": "klingon"})
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_header")
