"""The list of intended divergences from the reference schemas has only entries that are still needed."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from behaviour.item_samples import ITEMS
from support import wire_check
from support.live_server import LiveServer, make_settings
from support.references import is_available
from support.websocket_client import WebSocketClient
from support.wire_check import load_divergences

OPEN_RESPONSES = {"x-antiphon-compat": "open-responses"}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "draw"}
CITATION = {"type": "file_citation", "file_id": "file_1", "filename": "a.txt", "index": 0}
AUDIO = {"type": "response.audio.done", "sequence_number": 0}
SCRIPT = {
    "rules": [
        {"user": "think", "answers": [[{"reasoning": "Hm."}, {"text": "So."}]]},
        {"user": "draw", "answers": [[{"custom_tool_call": {"name": "draw", "input": "a cat"}}]]},
        {"user": "cite", "answers": [[{"text": "So."}, {"annotation": CITATION}]]},
        {"user": "fail", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "model_error"}}]]},
        {"user": "slowly", "answers": [[{"text": "One "}, {"wait": "gate"}, {"text": "two."}]]},
        {"user": "search", "answers": [[{"item": {"type": "web_search_call", "id": "ws_1", "status": "failed"}}]]},
        {"user": "audio", "answers": [[{"event": AUDIO}, {"text": "So."}]]},
        {
            "user": "vendor",
            "answers": [
                [{"event": {"type": "acme.tick", "sequence_number": 0}}, {"item": {"type": "acme:note", "id": "n_1"}}]
            ],
        },
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    running = LiveServer(SCRIPT, make_settings(keepalive_seconds=0.02))
    yield running
    running.stop()


def create(server: LiveServer, given: Any = "hi", headers: dict[str, str] | None = None, **options: Any) -> Any:
    return server.ask("POST", "/v1/responses", {"model": "scripted", "input": given} | options, headers=headers)


def show_keepalive(server: LiveServer) -> None:
    with WebSocketClient(server) as client:
        client.create("slowly")
        client.until("keepalive")
        server.do(lambda: server.backend.release("gate"))
        client.finish()


def show_steering(server: LiveServer) -> None:
    with WebSocketClient(server) as client:
        client.create("slowly")
        response_id = client.until("response.created")["response"]["id"]
        client.steer(response_id, None)
        client.until("response.steer.failed")
        client.steer(response_id)
        client.until("response.incomplete")
        client.finish()


def show_lists(server: LiveServer) -> None:
    plain = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    items = [plain, ITEMS["message"], ITEMS["mcp_approval_response"], ITEMS["shell_call"], ITEMS["compaction_trigger"]]
    made = server.ask("POST", "/v1/conversations", {"items": items}).json
    server.ask("GET", f"/v1/conversations/{made['id']}/items")
    response = create(server, [plain, {"role": "assistant", "content": [{"type": "output_text", "text": "ho"}]}]).json
    server.ask("GET", f"/v1/responses/{response['id']}/input_items")


def show_empty_list(server: LiveServer) -> None:
    made = server.ask("POST", "/v1/conversations", {}).json
    server.ask("GET", f"/v1/conversations/{made['id']}/items")


def show_stateless(server: LiveServer) -> None:
    running = LiveServer({}, make_settings(stateless=True))
    try:
        create(running)
    finally:
        running.stop()


EXAMPLES: dict[str, Callable[[LiveServer], object]] = {
    "reasoning": lambda server: create(server, "think", stream=True),
    "reasoning in open-responses": lambda server: create(server, "think", OPEN_RESPONSES, stream=True),
    "schema": lambda server: create(server, text={"format": SCHEMA}),
    "schema in open-responses": lambda server: create(server, "hi", OPEN_RESPONSES, text={"format": SCHEMA}),
    "keepalive": show_keepalive,
    "custom tool": lambda server: create(
        server, "draw", tools=[CUSTOM], tool_choice={"type": "custom", "name": "draw"}, stream=True
    ),
    "file citation": lambda server: create(server, "cite"),
    "steering": show_steering,
    "failure": lambda server: create(server, "fail", stream=True),
    "empty list": show_empty_list,
    "input items": show_lists,
    "stateless": show_stateless,
    "web search": lambda server: create(server, "search", stream=True),
    "vendor": lambda server: create(server, "vendor", stream=True),
    "audio": lambda server: create(server, "audio", stream=True),
    "compaction trigger": lambda server: create(
        server, [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}], stream=True
    ),
    "compaction": lambda server: server.ask(
        "POST", "/v1/responses/compact", {"model": "scripted", "input": [{"role": "user", "content": "hi"}] * 2}
    ),
}


@pytest.fixture(scope="module")
def violations(server: LiveServer) -> dict[str, list[Any]]:
    """Return the violations of each example."""
    found: dict[str, list[Any]] = {}
    for name, show in EXAMPLES.items():
        wire_check.take_recorded()
        show(server)
        recorded = wire_check.take_recorded()
        assert recorded, name
        found[name] = [
            violation for kind, body in recorded for violation in wire_check.find_violations(kind, json.loads(body))
        ]
    return found


@pytest.mark.parametrize("divergence", load_divergences(), ids=lambda divergence: divergence.name)
def test_listed_divergence_is_needed(violations: dict[str, list[Any]], divergence: Any) -> None:
    expected = {name for name in divergence.references if is_available(name)}
    covered = [violation for violation in violations[divergence.example] if divergence.covers(violation)]
    assert {violation.reference for violation in covered} == expected
    assert divergence.source


def test_examples_have_no_other_violations(violations: dict[str, list[Any]]) -> None:
    every = [violation for found in violations.values() for violation in found]
    assert [str(each) for each in every if not any(listed.covers(each) for listed in load_divergences())] == []


def test_payload_that_is_not_listed_is_reported(server: LiveServer) -> None:
    wire_check.take_recorded()
    made = create(server).json
    del made["model"]
    made["output"][0]["content"][0]["logprobs"] = None
    (recorded,) = wire_check.take_recorded()
    found = {str(each) for each in wire_check.find_violations(recorded.kind, made)}
    assert {
        "openai-sdk: response.model: required: 'model' is a required property",
    } <= found
    if is_available("open-responses"):
        path = "response.output[message].content[output_text].logprobs"
        assert f"open-responses: {path}: type: None is not of type 'array'" in found
