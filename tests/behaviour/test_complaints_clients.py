"""Complaints of clients that use the Responses API with every server: L83 to L86."""

import json
from collections.abc import Callable
from typing import Any

from support.live_server import LiveServer
from support.websocket_client import WebSocketClient

# The request that Codex sends for every turn.
CODEX: dict[str, Any] = {
    "model": "scripted",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread-1",
    "client_metadata": {"x": "y"},
}


def test_pain_l_83_default_paths_of_clients_exist(server: LiveServer) -> None:
    response = server.client().responses.create(model="scripted", input="hi")
    assert response.status == "completed"
    assert "scripted" in [model.id for model in server.client().models.list()]


def test_pain_l_85_history_sent_with_a_continuation_is_not_duplicated(
    serve: Callable[..., LiveServer],
) -> None:
    client = serve({"default": "I have read {history} items."}).client()
    first = client.responses.create(model="scripted", input="one")
    input_items = client.responses.input_items.list(first.id).data
    resent = [item.model_dump(exclude_none=True) for item in (*input_items, *first.output)]
    again = client.responses.create(
        model="scripted",
        previous_response_id=first.id,
        input=[*resent, {"role": "user", "content": "two"}],  # type: ignore[list-item]
    )
    assert again.output_text == "I have read 3 items."


def test_pain_l_84_codex_request_is_answered(server: LiveServer) -> None:
    answer = server.ask("POST", "/v1/responses", CODEX)
    assert answer.status == 200
    assert "event: response.output_item.done" in answer.body.decode()
    assert "event: response.completed" in answer.body.decode()
    assert "web_search is not available here" in answer.headers["x-antiphon-warnings"]


def test_pain_l_86_compaction_and_websocket_are_supported(server: LiveServer) -> None:
    compacted = server.ask("POST", "/v1/responses/compact", {"model": "scripted", "input": "hi"})
    assert (compacted.status, compacted.json["object"]) == (200, "response.compaction")
    with WebSocketClient(server) as client:
        client.socket.send(json.dumps({"type": "response.create", "model": "scripted", "input": "hi"}))
        assert json.loads(client.socket.recv())["type"] == "response.created"
