import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from antiphon.backends.chat_completions.backend import create
from antiphon.stream.sse import SseDecoder
from support import openresponses
from support.crashing_server import wait_until
from support.live_server import LiveServer, make_settings
from support.upstream_server import STALL, Reply, json_of, serve, stream_of
from support.upstream_thread import ThreadedServer


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with server.client() as client:
        yield client


def post(body: dict[str, Any]) -> bytes:
    """Return a create request as bytes."""
    data = json.dumps(body).encode()
    return b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def read_events(body: bytes) -> list[dict[str, Any]]:
    """Parse the events of a whole stream. It must end with [DONE]."""
    decoder = SseDecoder()
    messages = decoder.feed(body) + decoder.close()
    assert messages[-1].data == b"[DONE]"
    events = [json.loads(message.data) for message in messages[:-1]]
    assert [event["type"] for event in events] == [message.event for message in messages[:-1]]
    for event in events:
        openresponses.validate_event(event)
    return events


def test_response_without_streaming(client: OpenAI) -> None:
    response = client.responses.create(model="scripted", input="hello there")
    assert (response.status, response.output_text, response.model) == ("completed", "You said: hello there", "scripted")


def test_response_equals_its_stored_form_and_matches_open_responses(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi", "metadata": {"a": "b"}})
    openresponses.validate_response(answer.json)
    assert server.ask("GET", f"/v1/responses/{answer.json['id']}").json == answer.json


def test_stream_ends_with_the_stored_response(client: OpenAI) -> None:
    with client.responses.stream(model="scripted", input="hello there") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (text, final.output_text) == ("You said: hello there", "You said: hello there")
    assert client.responses.retrieve(final.id).output_text == text


def test_previous_response_is_part_of_the_history(client: OpenAI) -> None:
    first = client.responses.create(model="scripted", input="my name is ada")
    second = client.responses.create(model="scripted", input="thanks", previous_response_id=first.id)
    third = client.responses.create(model="scripted", input="recall", previous_response_id=second.id)
    assert third.output_text == "Your name is ada."


def test_tool_call_and_its_output(client: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
    first = client.responses.create(model="scripted", input="weather?", tools=[tool])
    (call,) = first.output
    assert call.type == "function_call"
    second = client.responses.create(
        model="scripted",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "mild"}],
        tools=[tool],
    )
    assert second.status == "completed"


def test_stream_bytes_are_server_sent_events(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "a b", "stream": True})
    assert (answer.status, answer.headers["content-type"], answer.headers["cache-control"]) == (
        200,
        "text/event-stream",
        "no-cache",
    )
    events = read_events(answer.body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events if event["type"] != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_deleted_response_is_not_found(server: Any, client: OpenAI) -> None:
    made = client.responses.create(model="scripted", input="hi")
    answer = server.ask("DELETE", f"/v1/responses/{made.id}")
    assert (answer.status, answer.json) == (200, {"id": made.id, "object": "response", "deleted": True})
    for method in ("GET", "DELETE"):
        assert server.ask(method, f"/v1/responses/{made.id}").json["error"] == {
            "message": f"Response with id '{made.id}' not found.",
            "type": "invalid_request_error",
            "param": "response_id",
            "code": "not_found",
        }


def test_unstored_response_is_not_found(server: Any, client: OpenAI) -> None:
    made = client.responses.create(model="scripted", input="hi", store=False)
    assert server.ask("GET", f"/v1/responses/{made.id}").status == 404


def test_stored_foreground_response_cannot_be_streamed(server: Any, client: OpenAI) -> None:
    made = client.responses.create(model="scripted", input="hi")
    answer = server.ask("GET", f"/v1/responses/{made.id}?stream=true")
    assert (answer.status, answer.json["error"]["param"]) == (400, "stream")


INPUT: Any = [{"role": "user", "content": f"line {number}"} for number in range(5)]


def test_input_items_are_paged_newest_first(client: OpenAI) -> None:
    made = client.responses.create(model="scripted", input=INPUT)
    first = client.responses.input_items.list(made.id, limit=2)
    texts = [[part.text for part in item.content] for item in client.responses.input_items.list(made.id, limit=2)]
    assert len(first.data) == 2
    assert texts == [[f"line {number}"] for number in (4, 3, 2, 1, 0)]


def test_input_item_page_has_first_and_last_id(server: Any, client: OpenAI) -> None:
    made = client.responses.create(model="scripted", input=INPUT)
    path = f"/v1/responses/{made.id}/input_items"
    whole = server.ask("GET", f"{path}?order=asc").json
    ids = [item["id"] for item in whole["data"]]
    assert [item["content"][0]["text"] for item in whole["data"]] == [f"line {number}" for number in range(5)]
    page = server.ask("GET", f"{path}?order=asc&limit=2&after={ids[1]}").json
    assert page == {
        "object": "list",
        "data": whole["data"][2:4],
        "first_id": ids[2],
        "last_id": ids[3],
        "has_more": True,
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=%C2%B2", "limit"),
        ("limit=", "limit"),
        ("order=up", "order"),
        ("include[]=everything", "include"),
        ("after=msg_unknown", "after"),
        ("after=%ff", None),
    ],
)
def test_invalid_query_names_the_parameter(server: Any, client: OpenAI, query: str, param: str | None) -> None:
    made = client.responses.create(model="scripted", input="hi")
    answer = server.ask("GET", f"/v1/responses/{made.id}/input_items?{query}")
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_include_is_accepted_and_unknown_query_parameter_is_a_warning(server: Any, client: OpenAI) -> None:
    made = client.responses.create(model="scripted", input="hi")
    path = f"/v1/responses/{made.id}/input_items?include[]=message.input_image.image_url&depth=2"
    answer = server.ask("GET", path)
    assert (answer.status, answer.headers["x-antiphon-warnings"]) == (200, "ignored: depth")


def test_input_tokens_count_the_whole_model_input(server: Any, client: OpenAI) -> None:
    made = client.responses.create(model="scripted", input="one two three")
    body = {"model": "scripted", "input": "four", "instructions": "Be kind.", "previous_response_id": made.id}
    answer = server.ask("POST", "/v1/responses/input_tokens", body | {"personality": "friendly"})
    assert (answer.status, answer.json) == (200, {"object": "response.input_tokens", "input_tokens": 3 + 5 + 1 + 2})
    assert answer.headers["x-antiphon-warnings"] == "ignored: personality"
    thought = [{"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": "hi"}]
    answer = server.ask("POST", "/v1/responses/input_tokens", {"model": "scripted", "input": thought})
    assert answer.headers["x-antiphon-warnings"] == "history: the reasoning rs_1 led to nothing and was left out"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": "hi"}, 400, "model"),
        ({"model": "nobody", "input": "hi"}, 404, "model"),
        ({"model": "scripted"}, 400, "input"),
        ({"model": "scripted", "input": []}, 400, "input"),
        ({"model": "scripted", "input": 3}, 400, "input"),
        ({"model": "scripted", "input": "hi", "previous_response_id": "resp_0"}, 400, "previous_response_id"),
    ],
)
def test_count_error_names_the_parameter(server: Any, body: dict[str, Any], status: int, param: str) -> None:
    answer = server.ask("POST", "/v1/responses/input_tokens", body)
    assert (answer.status, answer.json["error"]["param"]) == (status, param)


@pytest.mark.parametrize("fields", [{}, {"input": None}, {"input": []}, {"input": ""}])
def test_continuation_needs_no_input(server: Any, fields: dict[str, Any]) -> None:
    first = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "my name is ada"}).json
    items = [{"role": "user", "content": "hello"}]
    conversation = server.ask("POST", "/v1/conversations", {"items": items}).json
    for continued in ({"previous_response_id": first["id"]}, {"conversation": conversation["id"]}):
        body = {"model": "scripted"} | fields | continued
        assert server.ask("POST", "/v1/responses/input_tokens", body).status == 200
        assert server.ask("POST", "/v1/responses", body).json["status"] == "completed"


@pytest.mark.parametrize("empty", [[], ""])
def test_empty_input_without_instructions_or_history_is_refused(server: Any, empty: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": empty})
    assert (answer.status, answer.json["error"]) == (
        400,
        {
            "message": "'input' is empty, and there are neither instructions nor a previous response or conversation.",
            "type": "invalid_request_error",
            "param": "input",
            "code": "invalid_value",
        },
    )


def test_unknown_fields_are_listed_in_a_header(server: Any) -> None:
    body = {"model": "scripted", "input": [{"role": "user", "content": "hi", "foo": 1}], "top_k": 3}
    answer = server.ask("POST", "/v1/responses", body)
    assert answer.status == 200
    assert sorted(answer.headers["x-antiphon-warnings"].removeprefix("ignored: ").split(", ")) == [
        "input[0].foo",
        "top_k",
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "nobody", "input": "hi"}, 404, "model", "model_not_found"),
        ({"model": "scripted", "input": 3}, 400, "input", "invalid_type"),
        ({"model": "scripted", "input": "hi", "temperature": 3}, 400, "temperature", "invalid_value"),
        (
            {"model": "scripted", "input": "hi", "previous_response_id": "resp_0"},
            400,
            "previous_response_id",
            "previous_response_not_found",
        ),
        ({"model": "scripted", "input": "refuse"}, 400, None, "too_hot"),
    ],
)
def test_invalid_streaming_request_is_refused_before_the_stream(
    server: Any, stream: bool, body: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    answer = server.ask("POST", "/v1/responses", body | {"stream": stream})
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"], error["code"], sorted(error)) == (
        status,
        "invalid_request_error",
        param,
        code,
        ["code", "message", "param", "type"],
    )


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\xff"}', b"null", b"[" * 100_000, b"\x00", b'"x"'])
def test_invalid_body_is_refused(server: Any, body: bytes) -> None:
    answer = server.ask("POST", "/v1/responses", body)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


def test_failure_without_output_is_an_error(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "fail at once"})
    assert (answer.status, answer.json) == (
        500,
        {"error": {"message": "No.", "type": "server_error", "param": None, "code": "model_error"}},
    )


def test_failure_with_output_is_a_failed_response(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "fail later"})
    assert (answer.status, answer.json["status"], answer.json["error"]["code"]) == (200, "failed", "model_error")


def test_failure_during_the_stream_is_an_event(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "fail later", "stream": True})
    error, failed = read_events(answer.body)[-2:]
    assert (answer.status, error["type"], error["error"]["code"], failed["type"]) == (
        200,
        "error",
        "model_error",
        "response.failed",
    )
    assert server.ask("GET", f"/v1/responses/{failed['response']['id']}").json["status"] == "failed"


def test_sdk_raises_the_error(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="nobody", input="hi")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


GATED = {
    "rules": [
        {"user": "wait", "answers": [[{"text": "first "}, {"wait": "gate"}, {"text": "last"}]]},
        {"user": "flood", "answers": [[{"text": ["x" * 10_000] * 3_000}, {"wait": "end"}]]},
    ]
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed"])
def test_model_stops_when_the_client_disconnects(serve: Callable[..., Any], stream: bool, half: bool) -> None:
    running = serve(GATED)
    with running.connect() as client:
        client.sendall(post({"model": "scripted", "input": "wait", "stream": stream}))
        running.wait_for(lambda: running.backend.reached("gate"))
        client.shutdown(socket.SHUT_WR if half else socket.SHUT_RDWR)
        running.wait_for(running.backend.cancellation.wait)
    assert running.backend.cancelled == 1


def test_disconnected_response_is_stopped_and_stored_as_cancelled(serve: Callable[..., Any]) -> None:
    running = serve(GATED)
    seconds, received = 60.0, b""
    for _ in range(10):  # a busy machine may delay a single attempt by more than a second
        if seconds >= 1:
            received = start_and_disconnect(running)
            disconnected = time.monotonic()
            running.wait_for(running.backend.cancellation.wait)
            seconds = time.monotonic() - disconnected
            running.do(running.backend.cancellation.clear)
    assert seconds < 1
    response_id = received.partition(b'"id":"')[2].partition(b'"')[0].decode()
    wait_until(lambda: running.ask("GET", f"/v1/responses/{response_id}").json["status"] == "cancelled")
    stored = running.ask("GET", f"/v1/responses/{response_id}").json
    assert [part["text"] for part in stored["output"][0]["content"]] == ["first "]


def start_and_disconnect(running: Any) -> bytes:
    """Return the bytes that a client received before it disconnects while the model waits."""
    received = b""
    with running.connect() as client:
        client.sendall(post({"model": "scripted", "input": "wait", "stream": True}))
        while b'"delta":"first' not in received:
            received += (came := client.recv(65536))
            assert came, received
    return received


def test_first_delta_arrives_before_the_model_ends(serve: Callable[..., Any]) -> None:
    running = serve(GATED)
    with running.client() as client, client.responses.stream(model="scripted", input="wait") as stream:
        deltas = (event.delta for event in stream if event.type == "response.output_text.delta")
        assert next(deltas) == "first"
        running.do(lambda: running.backend.release("gate"))
        assert "".join(deltas) == " last"


def test_slow_reader_holds_the_model_back(serve: Callable[..., Any]) -> None:
    running = serve(GATED)
    with running.connect() as client:
        client.sendall(post({"model": "scripted", "input": "flood", "stream": True}))
        assert client.recv(12) == b"HTTP/1.1 200"
        # The model emits 30 MB at once. The response to another request shows that the event loop is free: the model
        # has not reached its end, so it waits for the reader.
        assert running.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}).status == 200
        with pytest.raises(TimeoutError):
            running.wait_for(lambda: reach_now(running, "end"))
    # A close with unread data resets the connection, so the server notices it although it cannot send.
    running.wait_for(running.backend.cancellation.wait)


async def reach_now(running: Any, gate: str) -> None:
    async with asyncio.timeout(0):
        await running.backend.reached(gate)


# Streams over an upstream that has answered before: they begin when it accepts the request.

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"Hello."}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWER = stream_of(CHUNK, END)
BODY = {"model": "m", "input": "hi", "stream": True, "unheard_of": 1}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "description": "d", "strict": False}


@contextmanager
def bridge(*replies: Reply, **settings: Any) -> Iterator[LiveServer]:
    """Start a server over an upstream with these replies."""
    upstream = ThreadedServer(serve(replies))
    options = {"base_url": upstream.url, "models": ["m"], "request_retries": 0, "stream_retries": 0}
    running = LiveServer({}, make_settings(**settings), others={"up": create("up", options, Path())})
    try:
        yield running
    finally:
        running.stop()
        upstream.close()


@pytest.mark.parametrize("compat", ["openai", "open-responses"])
def test_stream_of_known_upstream_equals_its_first_stream(compat: str) -> None:
    with bridge(ANSWER, ANSWER, compat=compat) as running:
        answers = [running.ask("POST", "/v1/responses", BODY | {"tools": [TOOL]}) for _ in range(2)]
    first, second = [normalize(answer.body) for answer in answers]
    assert first == second
    assert [event["type"] for event in first][:2] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in first] == list(range(len(first)))
    names = {"x-antiphon-served-by", "x-antiphon-warnings", "content-type", "transfer-encoding", "x-request-id"}
    for answer in answers:
        assert names <= answer.headers.keys()
        assert answer.headers["x-antiphon-served-by"] == "up/m"
        assert answer.headers["x-antiphon-warnings"] == "ignored: unheard_of"


def normalize(body: bytes) -> list[dict[str, Any]]:
    """Return the events without ids and times."""
    removed = {"id", "item_id", "created_at", "completed_at"}

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: strip(each) for name, each in value.items() if name not in removed}
        return [strip(each) for each in value] if isinstance(value, list) else value

    return [strip(event) for event in read_events(body)]


def test_sdk_gets_the_status_of_a_refusal_and_no_header_of_the_response() -> None:
    refusal = json_of({"error": {"message": "Slow down.", "type": "rate_limit_error"}}, 429, Retry_After="70")
    with bridge(ANSWER, refusal) as running:
        assert running.ask("POST", "/v1/responses", BODY).status == 200
        with pytest.raises(openai.RateLimitError) as caught:
            running.client().responses.create(model="m", input="hi", stream=True)
    headers = caught.value.response.headers
    assert (headers["retry-after"], "x-antiphon-served-by" in headers) == ("70", False)


def test_client_that_disconnects_after_the_first_events_leaves_a_cancelled_response() -> None:
    with bridge(ANSWER, stream_of(b": accepted\n\n", STALL)) as running:
        assert running.ask("POST", "/v1/responses", BODY).status == 200
        received = b""
        with running.connect() as client:
            client.sendall(post(BODY))
            while b'"type":"response.in_progress"' not in received:
                received += (came := client.recv(65536))
                assert came, received
        response_id = received.partition(b'"id":"')[2].partition(b'"')[0].decode()
        wait_until(lambda: running.engine.foreground_count == 0)
        stored = running.ask("GET", f"/v1/responses/{response_id}").json
    assert (stored["status"], stored["output"]) == ("cancelled", [])
