import json
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from support.live_server import TIMEOUT, LiveServer
from support.websocket_client import WebSocketClient, get_text, list_codes, normalise

GATED = {"user": "slowly", "answers": [[{"text": "One "}, {"wait": "gate"}, {"text": "two."}]]}
SCRIPT = {
    "rules": [
        GATED,
        {"user": "weather", "answers": [[{"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}}]]},
        {"user": "fail", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "model_error"}}]]},
        {"user": "crash at once", "answers": [[{"crash": "a secret of the inside"}]]},
        {"user": "crash later", "answers": [[{"text": "So "}, {"crash": "a secret of the inside"}]]},
    ],
    "default": "{history}",
}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def running(serve: Callable[..., LiveServer]) -> LiveServer:
    return serve(SCRIPT)


@pytest.fixture
def client(running: LiveServer) -> Any:
    with WebSocketClient(running) as client:
        yield client


# Opening


def test_get_without_an_upgrade_explains_what_to_send(server: Any) -> None:
    answer = server.ask("GET", "/v1/responses")
    assert (answer.status, answer.headers["upgrade"]) == (426, "websocket")
    assert answer.json == {
        "error": {
            "message": "GET opens a WebSocket on this path: send an upgrade request, or use POST.",
            "type": "invalid_request_error",
            "param": None,
            "code": "upgrade_required",
        }
    }


def refuse_upgrade(running: LiveServer, path: str, **headers: str) -> tuple[int, str, Any]:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{running.url.replace('http', 'ws')}{path}", additional_headers=headers, proxy=None)
    response = refused.value.response
    return response.status_code, json.loads(response.body)["error"]["code"], response.headers


def test_websocket_on_another_path_is_refused(server: Any) -> None:
    assert refuse_upgrade(server, "/v1/models")[:2] == (404, "unknown_url")


def test_websocket_needs_a_key(guarded: Any) -> None:
    status, code, headers = refuse_upgrade(guarded, "/v1/responses")
    assert (status, code, headers["www-authenticate"]) == (401, "invalid_api_key", 'Bearer realm="antiphon"')
    assert refuse_upgrade(guarded, "/v1/responses", Authorization="Bearer sk-wrong")[0] == 401
    with WebSocketClient(guarded, key="sk-ada") as client:
        client.ask()


def test_websocket_from_another_origin_is_refused_without_keys(server: Any) -> None:
    assert refuse_upgrade(server, "/v1/responses", Origin="http://evil.example")[:2] == (403, "origin_not_allowed")
    with WebSocketClient(server, headers={"Origin": f"http://127.0.0.1:{server.port}"}) as client:
        client.ask()


def test_websocket_belongs_to_the_project_of_its_key(guarded: Any) -> None:
    with WebSocketClient(guarded, key="sk-ada") as ada, WebSocketClient(guarded, key="sk-bob") as bob:
        made = ada.ask()
        assert ada.ask(previous_response_id=made["id"])["previous_response_id"] == made["id"]
        assert bob.refuse(previous_response_id=made["id"])["error"]["code"] == "previous_response_not_found"


# Responses


def test_websocket_events_equal_stream_events(running: LiveServer, client: WebSocketClient) -> None:
    for text, options in (("hi", {}), ("weather", {"tools": [FUNCTION]}), ("fail", {})):
        client.create(text, **options)
        body = {"model": "scripted", "input": text, "stream": True, **options}
        streamed = running.ask("POST", "/v1/responses", body).body.decode()
        lines = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
        assert normalise(client.finish()) == normalise([json.loads(line) for line in lines])
    client.create()
    assert client.next()["type"] == "response.created"


def test_requests_without_a_lane_run_in_order(running: LiveServer, client: WebSocketClient) -> None:
    client.create("slowly")
    client.create("hi")
    client.until("response.output_text.delta")
    running.do(lambda: running.backend.release("gate"))
    assert [get_text(client.finish()[-1]["response"]) for _ in range(2)] == ["One two.", "1"]


def test_lanes_run_concurrently_and_events_name_their_lane(running: LiveServer, client: WebSocketClient) -> None:
    client.create("slowly", stream_id="a")
    client.create("hi", stream_id="a")
    client.create("hi", stream_id="b")
    client.create("hi")
    events = client.finish("b")
    assert (events[-1]["type"], {event["stream_id"] for event in events}) == ("response.completed", {"b"})
    assert "stream_id" not in client.finish()[0]
    running.do(lambda: running.backend.release("gate"))
    assert [get_text(client.finish("a")[-1]["response"]) for _ in range(2)] == ["One two.", "1"]


def test_lane_may_continue_a_response_of_another_lane(client: WebSocketClient) -> None:
    first = client.ask(store=False, stream_id="a")
    assert get_text(client.ask(previous_response_id=first["id"], store=False, stream_id='"b"')) == "3"


def test_stream_parameter_is_optional(client: WebSocketClient) -> None:
    assert get_text(client.ask(stream=True)) == "1"


@pytest.mark.parametrize(
    ("options", "param"),
    [({"stream": False}, "stream"), ({"background": True}, "background"), ({"stream_id": "x" * 257}, "stream_id")],
)
def test_parameter_not_allowed_on_a_websocket_is_refused(client: WebSocketClient, options: Any, param: str) -> None:
    client.create(**options)
    error = client.next()
    assert (error["status"], error["error"]["param"]) == (400, param)


# Errors


def test_error_has_status_and_lane_and_keeps_the_connection(client: WebSocketClient) -> None:
    assert client.refuse(temperature=3, stream_id="a") == {
        "type": "error",
        "status": 400,
        "error": {
            "type": "invalid_request_error",
            "code": "invalid_value",
            "message": "Invalid value for 'temperature': Expected `float` <= 2.0.",
            "param": "temperature",
        },
        "stream_id": "a",
    }
    wrong = ["no json", b"{}", "[]", {"type": "response.stop"}, {"model": "scripted", "input": "hi"}]
    for message in wrong:
        client.send(message)
    assert list_codes([client.next() for _ in wrong]) == [
        (400, "invalid_json"),
        (400, "invalid_json"),
        (400, "invalid_type"),
        (400, "invalid_value"),
        (400, "missing_required_parameter"),
    ]
    assert client.refuse(model="other")["status"] == 404
    assert get_text(client.ask()) == "1"


def test_error_without_a_code_gets_its_type_as_code(client: WebSocketClient) -> None:
    lone = [{"type": "function_call_output", "call_id": "call_1", "output": "x"}]
    assert client.refuse(lone)["error"]["code"] == "invalid_request_error"


def test_websocket_error_hides_internal_details(client: WebSocketClient) -> None:
    client.create("crash at once")
    client.create("crash later")
    at_once, later = client.finish()[-1], client.finish()[-1]
    assert list_codes([at_once]) == [(500, "server_error")]
    assert (later["type"], "secret" in str([at_once, later])) == ("response.failed", False)


# Continuation


def test_unstored_response_continues_only_on_its_connection(running: LiveServer, client: WebSocketClient) -> None:
    first = client.ask(store=False)
    second = client.ask(store=False, previous_response_id=first["id"])
    assert get_text(second) == "3"
    with WebSocketClient(running) as other:
        error = other.refuse(previous_response_id=second["id"])
    assert error["error"] == {
        "type": "invalid_request_error",
        "code": "previous_response_not_found",
        "message": f"Previous response with id '{second['id']}' not found. It is unknown here, deleted, expired, or "
        "was not stored: send the whole history in 'input' instead.",
        "param": "previous_response_id",
    }
    assert running.ask("GET", f"/v1/responses/{second['id']}").status == 404
    assert get_text(client.ask(previous_response_id=first["id"])) == "3"


def test_session_retains_items_that_share_an_id(client: WebSocketClient) -> None:
    shared = [{"id": "m", "role": "user", "content": text} for text in ("one", "two")]
    first = client.ask(shared, store=False)
    assert (get_text(first), get_text(client.ask(store=False, previous_response_id=first["id"]))) == ("2", "4")
    whole = [*shared, *first["output"], {"role": "user", "content": "and?"}]
    assert get_text(client.ask(whole, store=False, previous_response_id=first["id"])) == "4"


def test_stored_response_continues_on_any_connection(running: LiveServer, client: WebSocketClient) -> None:
    first = client.ask()
    with WebSocketClient(running) as other:
        assert get_text(other.ask(previous_response_id=first["id"])) == "3"
    assert running.ask("GET", f"/v1/responses/{first['id']}").json == first


def test_stored_continuation_of_an_unstored_response_until_deleted(
    running: LiveServer, client: WebSocketClient
) -> None:
    first = client.ask(store=False)
    second = client.ask(previous_response_id=first["id"])
    assert get_text(client.ask(previous_response_id=second["id"])) == "5"
    running.ask("DELETE", f"/v1/responses/{second['id']}")
    assert client.refuse(previous_response_id=second["id"])["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    "failing",
    [
        {"text": [{"type": "function_call_output", "call_id": "unknown", "output": "x"}]},
        {"temperature": 3},
        {"background": True},
        {"text": "fail"},
    ],
    ids=["refused", "invalid", "unsupported", "failed"],
)
def test_failed_continuation_evicts_the_previous_response(client: WebSocketClient, failing: dict[str, Any]) -> None:
    lost, stored = client.ask(store=False), client.ask()
    for previous in (lost, stored):
        client.create(**{"text": "hi", **failing}, previous_response_id=previous["id"])
        assert client.finish()[-1]["type"] in ("error", "response.failed")
    assert client.refuse(previous_response_id=lost["id"])["error"]["code"] == "previous_response_not_found"
    assert get_text(client.ask(previous_response_id=stored["id"])) == "3"


def test_continuation_has_the_tools_of_an_unstored_response(client: WebSocketClient) -> None:
    first = client.ask(tools=[FUNCTION], store=False)
    assert client.ask(previous_response_id=first["id"], store=False)["tools"] == first["tools"] != []


def test_stateless_server_continues_within_a_connection(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, stateless=True)
    with WebSocketClient(running) as client, WebSocketClient(running) as other:
        first = client.ask()
        assert get_text(client.ask(previous_response_id=first["id"])) == "3"
        assert other.refuse(previous_response_id=first["id"])["error"]["code"] == "previous_response_not_found"


# Preparing without generating


def test_generate_false_prepares_the_next_request(client: WebSocketClient) -> None:
    client.create("hi", generate=False, store=False, tools=[FUNCTION])
    events = client.finish()
    prepared = events[-1]["response"]
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
    assert (prepared["status"], prepared["output"], prepared["usage"]["total_tokens"]) == ("completed", [], 0)
    after = client.ask("and now", store=False, previous_response_id=prepared["id"])
    assert (get_text(after), after["tools"]) == ("2", prepared["tools"])


def test_generate_false_is_validated(client: WebSocketClient) -> None:
    assert client.refuse(generate=False, model="other")["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["generate", "stream_id"])
def test_websocket_parameter_is_refused_over_http(server: Any, name: str) -> None:
    value: Any = {"generate": False, "stream_id": "a"}[name]
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi", name: value})
    assert answer.json["error"] == {
        "message": f"'{name}' belongs to WebSocket mode: connect to this URL with a WebSocket to use it.",
        "type": "invalid_request_error",
        "param": name,
        "code": "unsupported_parameter",
    }


# Keepalive


def test_idle_lane_gets_keepalive_events(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, keepalive_seconds=0.05)
    with WebSocketClient(running) as client:
        client.create("slowly", stream_id="a")
        before = client.until("response.output_text.delta", "a")
        while (event := client.next("a"))["type"] != "keepalive":
            before = event
        assert event == {"type": "keepalive", "sequence_number": before["sequence_number"], "stream_id": "a"}
        running.do(lambda: running.backend.release("gate"))
        assert client.finish("a")[-1]["type"] == "response.completed"


def test_keepalive_events_respect_the_interval(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, keepalive_seconds=0.2)
    began = time.monotonic()
    with WebSocketClient(running) as client:
        client.create("slowly")
        for _ in range(5):
            client.until("keepalive")
    # They may come late, but not early. One of the five intervals allows for the resolution of timers.
    assert time.monotonic() - began > 4 * 0.2


def test_idle_connection_is_pinged(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, keepalive_seconds=0.05)
    with running.connect() as raw:
        raw.sendall(
            b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        received = b""
        while received.count(b"\x89\x04") < 2:  # pings continue although no pong is sent
            received += raw.recv(4096)
    assert received.startswith(b"HTTP/1.1 101 ")


def test_open_responses_lane_gets_pings_only(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, keepalive_seconds=0.05)
    message = json.dumps({"type": "response.create", "model": "scripted", "input": "slowly"}).encode()
    assert len(message) < 126
    with running.connect() as raw:
        raw.sendall(
            b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"x-antiphon-compat: open-responses\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        received = b""
        while b"\r\n\r\n" not in received:
            received += raw.recv(4096)
        raw.sendall(bytes((0x81, 0x80 | len(message))) + bytes(4) + message)  # masked with zeros
        while b"output_text.delta" not in received:
            received += raw.recv(4096)
        idle = b""
        while idle.count(b"\x89\x04") < 6:
            idle += raw.recv(4096)
    assert b"keepalive" not in received + idle


# The log


def test_log_has_a_line_per_response_and_per_connection(running: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.access")
    with WebSocketClient(running) as client:
        made = client.ask(stream_id="a", top_k=3)
        client.refuse(model="other")
        client.create("fail")
        client.finish()
    running.stop()
    lines = [record.msg for record in caplog.records if record.name == "antiphon.access"]
    logged = [(line.method, line.status, line.model, line.error, line.warnings) for line in lines]
    assert logged == [
        ("WS", 200, "scripted", None, ["ignored: top_k"]),
        ("WS", 404, "other", "model_not_found", []),
        ("WS", 200, "scripted", "model_error", []),
        ("GET", 101, None, None, []),
    ]
    assert (lines[0].response_id, lines[0].stream, len({line.request_id for line in lines})) == (made["id"], True, 1)
    assert all(0 <= line.ms < TIMEOUT * 1000 and line.bytes > 100 for line in lines)
