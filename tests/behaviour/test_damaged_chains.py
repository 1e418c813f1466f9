"""Chains and conversations that a client damaged: the statuses and codes of docs/errors.md, on every transport."""

from typing import Any

import pytest

from support.live_server import LiveServer
from support.websocket_client import WebSocketClient

UNKNOWN = "previous_response_not_found"
CASES: list[tuple[dict[str, Any], tuple[int, str, str | None]]] = [
    ({"previous_response_id": "resp_of_another_server"}, (400, "previous_response_id", UNKNOWN)),
    ({"previous_response_id": "resp_" + "x" * 500}, (400, "previous_response_id", UNKNOWN)),
    *(
        ({"previous_response_id": malformed}, (400, "previous_response_id", "invalid_value"))
        for malformed in ("", " ", "conv_1", "msg_1", "chatcmpl-1", "resp_1:2", "resp_ä", "resp_1\n", "@results.ress")
    ),
    ({"previous_response_id": "resp_" + "x" * 508}, (400, "previous_response_id", "string_above_max_length")),
    ({"conversation": "conv_of_another_server"}, (404, "conversation", "not_found")),
    ({"conversation": {"id": "conv_of_another_server"}}, (404, "conversation", "not_found")),
    *(
        ({"conversation": malformed}, (400, "conversation", "invalid_value"))
        for malformed in ("", "resp_1", "conv_1/items", {"id": "resp_1"}, {"id": "conv_1 "})
    ),
    ({"conversation": "conv_" + "x" * 508}, (400, "conversation", "string_above_max_length")),
    (
        {
            "input": [
                {"type": "message", "role": "user", "id": "msg_1", "content": "one"},
                {"type": "message", "role": "user", "id": "msg_1", "content": "two"},
            ]
        },
        (400, "input", None),
    ),
]


def send(server: LiveServer, body: dict[str, Any], path: str = "/v1/responses") -> tuple[int, str, str | None]:
    answer = server.ask("POST", path, {"model": "scripted", "input": "hi"} | body)
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error"
    return answer.status, error["param"], error["code"]


@pytest.mark.parametrize(("body", "expected"), CASES)
def test_damaged_chain_is_refused(server: LiveServer, body: dict[str, Any], expected: Any) -> None:
    assert send(server, body) == expected
    assert send(server, body | {"stream": True}) == expected
    assert send(server, body | {"background": True}) == expected


@pytest.mark.parametrize(("body", "expected"), CASES)
def test_damaged_chain_is_refused_on_a_websocket(server: LiveServer, body: dict[str, Any], expected: Any) -> None:
    status, param, code = expected
    with WebSocketClient(server) as client:
        client.send({"type": "response.create", "model": "scripted", "input": "hi"} | body)
        refused = client.next()
        # A message must have a code: Open Responses requires a string.
        found = (refused["status"], refused["error"]["param"], refused["error"]["code"])
        assert found == (status, param, code or "invalid_request_error")
        assert client.ask()["status"] == "completed"


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/responses/compact"])
@pytest.mark.parametrize(("body", "expected"), [case for case in CASES if "previous_response_id" in case[0]])
def test_damaged_chain_is_refused_by_other_endpoints(
    server: LiveServer, path: str, body: dict[str, Any], expected: Any
) -> None:
    assert send(server, body, path) == expected


def test_duplicate_item_error_names_the_id(server: LiveServer) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": []}
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": [item, item]})
    assert answer.json["error"] == {
        "message": "Duplicate item found with id 'rs_1': send each item once, or without an id.",
        "type": "invalid_request_error",
        "param": "input",
        "code": None,
    }


@pytest.mark.parametrize("item_id", ["review:rollout:user", "019f629b-43ee-7a82-acb1-3071dbffbdad", "fc_1", "x" * 300])
def test_item_with_an_id_of_another_server_is_accepted(server: LiveServer, item_id: str) -> None:
    message = {"type": "message", "role": "user", "id": item_id, "content": "hi"}
    made = server.ask("POST", "/v1/responses", {"model": "scripted", "input": [message]})
    assert made.status == 200
    listed = server.ask("GET", f"/v1/responses/{made.json['id']}/input_items").json["data"]
    assert [item["id"] for item in listed] == [item_id]


@pytest.mark.parametrize("call_id", ["x" * 116, "call:1", "ü"])
def test_call_with_an_id_of_another_server_is_accepted(server: LiveServer, call_id: str) -> None:
    call = {"type": "function_call", "call_id": call_id, "name": "look_up", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": call_id, "output": "nothing"}
    assert server.ask("POST", "/v1/responses", {"model": "scripted", "input": [call, output]}).status == 200


@pytest.mark.parametrize("response_id", ["resp_1", "conv_1", "a:b", "x" * 300])
def test_unknown_id_in_a_path_is_not_found(server: LiveServer, response_id: str) -> None:
    for path in f"/v1/responses/{response_id}", f"/v1/conversations/{response_id}":
        answer = server.ask("GET", path)
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
