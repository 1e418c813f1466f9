"""Background responses over HTTP: queued at once, read from any number, cancelled; and their clients may leave."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.stream.sse import SseDecoder

GATED = {"rules": [{"user": "wait", "answers": [[{"text": "first "}, {"wait": "gate"}, {"text": "last"}]]}]}


def start_background(running: Any, text: str = "wait") -> str:
    answer = running.ask("POST", "/v1/responses", {"model": "scripted", "input": text, "background": True})
    assert (answer.status, answer.json["status"], answer.json["background"]) == (200, "queued", True)
    response_id: str = answer.json["id"]
    return response_id


def read(running: Any, response_id: str, query: str = "") -> list[bytes]:
    """Read the events of a stream. It must end with [DONE]."""
    answer = running.ask("GET", f"/v1/responses/{response_id}?stream=true{query}")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    *events, done = answer.body.split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    return events


def test_background_response_is_queued_then_completed(server: Any) -> None:
    response_id = start_background(server, "hello")
    events = [json.loads(event.partition(b"data: ")[2]) for event in read(server, response_id)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events][:3] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1]["response"] == server.ask("GET", f"/v1/responses/{response_id}").json


def test_stream_resumes_after_any_number_with_the_same_bytes(server: Any) -> None:
    response_id = start_background(server, "hello")
    whole = read(server, response_id)
    for number in range(len(whole) + 1):
        assert read(server, response_id, f"&starting_after={number}") == whole[number + 1 :]


def test_create_stream_equals_the_stream_read_later(server: Any) -> None:
    body = {"model": "scripted", "input": "hello", "background": True, "stream": True}
    answer = server.ask("POST", "/v1/responses", body)
    created = json.loads(SseDecoder().feed(answer.body)[0].data)
    again = server.ask("GET", f"/v1/responses/{created['response']['id']}?stream=true&include_obfuscation=false")
    assert answer.body == again.body


def test_queued_event_is_sent_before_a_slot_is_free(serve: Callable[..., Any]) -> None:
    running = serve(GATED, background_slots=1)
    start_background(running)
    running.wait_for(lambda: running.backend.reached("gate"))
    data = json.dumps({"model": "scripted", "input": "wait", "background": True, "stream": True}).encode()
    with running.connect() as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        received = b""
        while b"event: response.queued" not in received or not received.endswith(b"\n\n\r\n"):
            received += client.recv(65536)
    events = received.partition(b"\r\n\r\n")[2].partition(b"\r\n")[2].removesuffix(b"\n\n\r\n").split(b"\n\n")
    response_id = received.partition(b'"id":"')[2].partition(b'"')[0].decode()
    assert running.ask("GET", f"/v1/responses/{response_id}").json["status"] == "queued"
    for _ in range(2):
        running.do(lambda: running.backend.release("gate"))
    whole = read(running, response_id)
    assert (len(events), events) == (2, whole[:2])
    assert [json.loads(event.partition(b"data: ")[2])["sequence_number"] for event in whole] == list(range(len(whole)))


def test_run_continues_when_the_streaming_client_disconnects(serve: Callable[..., Any]) -> None:
    running = serve(GATED)
    data = json.dumps({"model": "scripted", "input": "wait", "background": True, "stream": True}).encode()
    with running.connect() as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        received = b""
        while b'"delta":"first' not in received:
            received += client.recv(65536)
        client.shutdown(socket.SHUT_RDWR)
    response_id = received.partition(b'"id":"')[2].partition(b'"')[0].decode()
    running.do(lambda: running.backend.release("gate"))
    events = read(running, response_id)
    assert (running.backend.cancelled, json.loads(events[-1].partition(b"data: ")[2])["type"]) == (
        0,
        "response.completed",
    )


def test_resumed_stream_sends_headers_before_the_next_event(serve: Callable[..., Any]) -> None:
    running = serve(GATED, keepalive_seconds=0.01)
    response_id = start_background(running)
    running.wait_for(lambda: running.backend.reached("gate"))
    with running.connect() as client:
        client.sendall(
            f"GET /v1/responses/{response_id}?stream=true&starting_after=5 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )
        received = b""
        while b"event: keepalive" not in received:
            received += client.recv(65536)
        running.do(lambda: running.backend.release("gate"))
        while b"[DONE]" not in received:
            received += client.recv(65536)
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b'"delta":"last"' in received


def test_cancel_ends_the_run_and_is_idempotent(serve: Callable[..., Any]) -> None:
    running = serve(GATED)
    response_id = start_background(running)
    running.wait_for(lambda: running.backend.reached("gate"))
    first = running.ask("POST", f"/v1/responses/{response_id}/cancel")
    assert (first.status, first.json["status"], running.backend.cancelled) == (200, "cancelled", 1)
    assert running.ask("POST", f"/v1/responses/{response_id}/cancel").json == first.json
    assert running.ask("GET", f"/v1/responses/{response_id}").json == first.json


def test_cancel_ends_a_stream_with_a_connected_client(serve: Callable[..., Any]) -> None:
    running = serve(GATED)
    with running.client() as client, client.responses.create(model="scripted", input="wait", stream=True) as stream:
        response_id = next(stream).response.id
        running.wait_for(lambda: running.backend.reached("gate"))
        cancelled = running.ask("POST", f"/v1/responses/{response_id}/cancel").json
        *_, last = stream
    assert (cancelled["status"], last.type, last.response.status) == ("cancelled", "response.incomplete", "cancelled")


def test_cancel_of_an_unknown_response_is_not_found(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses/resp_0/cancel")
    assert (answer.status, answer.json["error"]["param"]) == (404, "response_id")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=%C2%B2", "starting_after"),
        ("stream=true&starting_after=", "starting_after"),
        ("stream=true&starting_after=99999999999999999999", "starting_after"),
        ("stream=yes", "stream"),
        ("include_obfuscation=maybe", "include_obfuscation"),
        ("stream=true&include=everything", "include"),
    ],
)
def test_invalid_query_names_the_parameter(server: Any, query: str, param: str) -> None:
    answer = server.ask("GET", f"/v1/responses/{start_background(server, 'hello')}?{query}")
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_starting_after_without_stream_is_ignored_with_a_warning(server: Any) -> None:
    answer = server.ask("GET", f"/v1/responses/{start_background(server, 'hello')}?starting_after=3")
    assert (answer.status, answer.headers["x-antiphon-warnings"]) == (200, "ignored: starting_after")


def test_stream_of_another_project_is_not_found(guarded: Any) -> None:
    ada, bob = ({"Authorization": f"Bearer {key}"} for key in ("sk-ada", "sk-bob"))
    body = {"model": "scripted", "input": "hello", "background": True}
    response_id = guarded.ask("POST", "/v1/responses", body, headers=ada).json["id"]
    assert guarded.ask("GET", f"/v1/responses/{response_id}?stream=true", headers=bob).status == 404
    assert guarded.ask("POST", f"/v1/responses/{response_id}/cancel", headers=bob).status == 404
