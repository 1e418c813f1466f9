"""The WebSocket cases of the Open Responses acceptance suite. Each message is validated against its schema."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support import openresponses
from support.live_server import LiveServer
from support.websocket_client import WebSocketClient, get_text

SCRIPT = {
    "rules": [{"user": "slowly", "answers": [[{"text": "One "}, {"wait": "gate"}, {"text": "two."}]]}],
    "default": "{history}",
}


class ValidatingClient(WebSocketClient):
    """A client that validates each message against the schemas of Open Responses."""

    def read(self) -> dict[str, Any]:
        event = super().read()
        if "status" in event:
            openresponses.validate_socket_error(event)
        else:
            openresponses.validate_event(event)
        return event


@pytest.fixture
def running(serve: Callable[..., LiveServer]) -> LiveServer:
    return serve(SCRIPT)


@pytest.fixture
def client(running: LiveServer) -> Iterator[ValidatingClient]:
    with ValidatingClient(running) as client:
        yield client


def message(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "user", "content": text}]


def not_found(client: WebSocketClient, response: dict[str, Any]) -> tuple[int, str, str]:
    error = client.refuse(message("hi"), store=False, previous_response_id=response["id"])
    return error["status"], error["error"]["code"], error["error"]["param"]


NOT_FOUND = (400, "previous_response_not_found", "previous_response_id")


def test_websocket_streams_a_response(client: WebSocketClient) -> None:
    client.create(message("hi"))
    events = client.finish()
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    openresponses.validate_response(events[-1]["response"])


def test_delayed_first_token_adds_no_message(serve: Callable[..., LiveServer]) -> None:
    script = {"default": [{"wait": "gate"}, {"text": "Hello."}]}
    running = serve(script, keepalive_seconds=0.02, opening_seconds=0, compat="open-responses")
    other = {"x-antiphon-compat": "openai"}
    with ValidatingClient(running) as client, WebSocketClient(running, headers=other) as watcher:
        client.create(message("hi"))
        started = [client.next(), client.next()]
        # Both connections have the same timer, so this one is idle at least as long as the other.
        watcher.create(message("hi"))
        for _ in range(3):
            watcher.until("keepalive")
        for _ in range(2):
            running.do(lambda: running.backend.release("gate"))
        events = [*started, *client.finish()]
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    openresponses.validate_response(events[-1]["response"])


def test_turns_continue_on_one_connection(client: WebSocketClient) -> None:
    first = client.ask(message("one"), store=True)
    second = client.ask(message("two"), store=True, previous_response_id=first["id"])
    assert (get_text(second), second["previous_response_id"]) == ("3", first["id"])


def test_unstored_turn_continues_with_new_input_only(client: WebSocketClient) -> None:
    first = client.ask(message("one"), store=False)
    assert get_text(client.ask(message("two"), store=False, previous_response_id=first["id"])) == "3"


def test_unstored_response_is_unknown_on_a_new_connection(running: LiveServer, client: WebSocketClient) -> None:
    first = client.ask(message("one"), store=False)
    with ValidatingClient(running) as later:
        assert not_found(later, first) == NOT_FOUND


def test_unknown_previous_response_is_an_error_with_a_status(client: WebSocketClient) -> None:
    assert not_found(client, {"id": "resp_unknown"}) == NOT_FOUND


def test_failed_continuation_evicts_its_previous_response(client: WebSocketClient) -> None:
    first = client.ask(message("one"), store=False)
    output = [{"type": "function_call_output", "call_id": "call_unknown", "output": "x"}]
    assert client.refuse(output, store=False, previous_response_id=first["id"])["status"] == 400
    assert not_found(client, first) == NOT_FOUND


def test_second_request_waits_for_the_first(running: LiveServer, client: WebSocketClient) -> None:
    client.create(message("slowly"))
    client.create(message("hi"))
    running.wait_for(lambda: running.backend.reached("gate"))
    running.do(lambda: running.backend.release("gate"))
    answers = [client.finish(), client.finish()]
    assert [events[-1]["type"] for events in answers] == ["response.completed"] * 2
    assert [get_text(events[-1]["response"]) for events in answers] == ["One two.", "1"]
    assert [len({event["response"]["id"] for event in events if "response" in event}) for events in answers] == [1, 1]


def test_error_leaves_the_connection_open(client: WebSocketClient) -> None:
    client.create(message("hi"), model=None)
    assert client.next()["error"]["code"] == "missing_required_parameter"
    assert client.ask(message("hi"))["status"] == "completed"


def test_compacted_window_works_as_new_input(running: LiveServer, client: WebSocketClient) -> None:
    body = {"model": "scripted", "input": message("one") + message("two")}
    answer = running.ask("POST", "/v1/responses/compact", body)
    assert (answer.status, answer.json["output"][-1]["type"]) == (200, "compaction")
    made = client.ask([*answer.json["output"], *message("three")], store=False)
    assert made["status"] == "completed"
    assert client.ask(message("four"), store=False, previous_response_id=made["id"])["status"] == "completed"


def test_expired_connection_gets_an_error(serve: Callable[..., LiveServer]) -> None:
    with ValidatingClient(serve(SCRIPT, websocket_max_seconds=0.01)) as client:
        assert client.next()["error"]["code"] == "websocket_connection_limit_reached"
