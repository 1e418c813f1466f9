"""What the acceptance suite of Open Responses asks of a WebSocket, each message checked against its document."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support import openresponses
from support.live_server import LiveServer
from support.websocket_client import TERMINAL, WebSocketClient, get_text

SCRIPT = {
    "rules": [{"user": "slowly", "answers": [[{"text": "One "}, {"wait": "gate"}, {"text": "two."}]]}],
    "default": "{history}",
}


class Judged(WebSocketClient):
    """A client that takes nothing that is not in the document."""

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
def client(running: LiveServer) -> Iterator[Judged]:
    with Judged(running) as client:
        yield client


def message(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "user", "content": text}]


def not_found(client: WebSocketClient, response: dict[str, Any]) -> tuple[int, str, str]:
    error = client.refuse(message("hi"), store=False, previous_response_id=response["id"])
    return error["status"], error["error"]["code"], error["error"]["param"]


NOT_FOUND = (400, "previous_response_not_found", "previous_response_id")


def test_a_response_is_told_on_a_websocket(client: WebSocketClient) -> None:
    client.create(message("hi"))
    events = client.finish()
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    openresponses.validate_response(events[-1]["response"])


def test_turns_follow_each_other_on_one_connection(client: WebSocketClient) -> None:
    first = client.ask(message("one"), store=True)
    second = client.ask(message("two"), store=True, previous_response_id=first["id"])
    assert (get_text(second), second["previous_response_id"]) == ("3", first["id"])


def test_a_turn_that_is_not_stored_goes_on_with_new_input_alone(client: WebSocketClient) -> None:
    first = client.ask(message("one"), store=False)
    assert get_text(client.ask(message("two"), store=False, previous_response_id=first["id"])) == "3"


def test_a_new_connection_does_not_see_what_was_not_stored(running: LiveServer, client: WebSocketClient) -> None:
    first = client.ask(message("one"), store=False)
    with Judged(running) as later:
        assert not_found(later, first) == NOT_FOUND


def test_an_unknown_previous_response_is_an_error_with_a_status(client: WebSocketClient) -> None:
    assert not_found(client, {"id": "resp_unknown"}) == NOT_FOUND


def test_a_failed_continuation_evicts_what_it_named(client: WebSocketClient) -> None:
    first = client.ask(message("one"), store=False)
    output = [{"type": "function_call_output", "call_id": "call_unknown", "output": "x"}]
    assert client.refuse(output, store=False, previous_response_id=first["id"])["status"] == 400
    assert not_found(client, first) == NOT_FOUND


def test_a_second_request_waits_for_the_first(running: LiveServer, client: WebSocketClient) -> None:
    client.create(message("slowly"))
    client.create(message("hi"))
    running.wait_for(lambda: running.backend.reached("gate"))
    running.do(lambda: running.backend.release("gate"))
    events = client.finish() + client.finish()
    ids = [event["response"]["id"] for event in events if "response" in event]
    assert [event["type"] for event in events if event["type"] in TERMINAL] == ["response.completed"] * 2
    assert ids == sorted(ids)


def test_an_error_leaves_the_connection_open(client: WebSocketClient) -> None:
    client.create(message("hi"), model=None)
    assert client.next()["error"]["code"] == "missing_required_parameter"
    assert client.ask(message("hi"))["status"] == "completed"


def test_a_compacted_window_is_taken_as_new_input(running: LiveServer, client: WebSocketClient) -> None:
    asked = {"model": "scripted", "input": message("one") + message("two")}
    answer = running.ask("POST", "/v1/responses/compact", asked)
    assert (answer.status, answer.json["output"][-1]["type"]) == (200, "compaction")
    made = client.ask([*answer.json["output"], *message("three")], store=False)
    assert made["status"] == "completed"
    assert client.ask(message("four"), store=False, previous_response_id=made["id"])["status"] == "completed"


def test_a_connection_that_is_too_old_is_told_so(serve: Callable[..., LiveServer]) -> None:
    with Judged(serve(SCRIPT, websocket_max_seconds=0.01)) as client:
        assert client.next()["error"]["code"] == "websocket_connection_limit_reached"
