"""Complaints about servers with a Responses API upstream: C42, E56, H71, H75, J81."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.registry import create
from behaviour.upstreams import NO_RETRIES, answered, bridge, recorded, refuse
from behaviour.wire import Json, say
from support.live_server import LiveServer, make_settings
from support.upstream_server import json_of, serve, stream_of


async def test_pain_c_42_rejected_reasoning_is_not_sent_again() -> None:
    """BerriAI/litellm#38842"""
    refused = refuse(
        "Unsupported parameter: 'reasoning.effort' is not supported with this model.",
        param="reasoning.effort",
        code="unsupported_parameter",
    )
    # Codex sends these to every model.
    fields = {"reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    async with bridge(refused, answered(), answered(), kind="responses") as it:
        answers = [await it.post("/v1/responses", {"model": "m", "input": "hi"} | fields) for _ in range(2)]
        sent = [("reasoning" in body, body["include"]) for body in it.sent]
    assert [answer.json["status"] for answer in answers] == ["completed", "completed"]
    assert sent == [(True, ["reasoning.encrypted_content"]), (False, []), (False, [])]
    warnings = [answer.headers["x-antiphon-warnings"] for answer in answers]
    assert warnings == ["no effect on this model: reasoning"] * 2


async def test_pain_c_42_rejected_encrypted_reasoning_is_not_requested_again() -> None:
    """BerriAI/litellm#38842"""
    refused = refuse("Encrypted content is not supported with this model.", param="include")
    async with bridge(refused, answered(), answered(), kind="responses") as it:
        for _ in range(2):
            assert (await it.ask("hi", reasoning={"effort": "high"}))["status"] == "completed"
        sent = [(body["reasoning"], body["include"]) for body in it.sent]
    effort = {"effort": "high"}
    assert sent == [(effort, ["reasoning.encrypted_content"]), (effort, []), (effort, [])]


@pytest.mark.parametrize("stored", [True, False])
async def test_pain_e_56_reasoning_the_upstream_cannot_decrypt_is_dropped(
    stored: bool,
) -> None:
    """maximhq/bifrost#5892, Wei-Shaw/sub2api#3038, anomalyco/opencode#48864"""
    message = "The encrypted content gAAA...DQ== could not be verified."
    refused = refuse(message, code="invalid_encrypted_content")
    reasoning_items = [
        {"type": "reasoning", "summary": [], "encrypted_content": each} for each in ("old key", "new key")
    ]
    fields: Json = {"reasoning": {"effort": "low"}, "store": stored}
    if not stored:
        fields["include"] = ["reasoning.encrypted_content"]
    replies = [answered(reasoning_items[0]), refused, answered(reasoning_items[1]), answered()]
    async with bridge(*replies, kind="responses") as it:
        history: list[Any] = []
        previous = None
        for word in ("one", "two", "three"):
            message = [say("user", word)]
            if stored:
                response = await it.ask(message, previous_response_id=previous, **fields)
            else:
                response = await it.ask([*history, *message], **fields)
            assert response["status"] == "completed"
            previous, history = response["id"], [*history, *message, *response["output"]]
        sent = [
            [item["encrypted_content"] for item in body["input"] if item["type"] == "reasoning"] for body in it.sent
        ]
    # Reasoning that was encrypted later is still sent.
    assert sent == [[], ["old key"], [], ["new key"]]


MCP = {"type": "mcp", "server_label": "docs", "server_url": "https://mcp.example.org", "require_approval": "always"}


async def test_pain_h_71_approval_request_of_the_upstream_is_forwarded() -> None:
    """ogx-ai/ogx#3443, smg-project/smg#159, vllm-project/agentic-api#145"""
    request = {"type": "mcp_approval_request", "id": "mcpr_up", "server_label": "docs", "name": "f", "arguments": "{}"}
    async with bridge(answered(request), answered(), kind="responses") as it:
        first = await it.ask("hi", tools=[MCP])
        request_item = first["output"][0]
        approval = {"type": "mcp_approval_response", "approval_request_id": request_item["id"], "approve": True}
        await it.ask([approval], previous_response_id=first["id"], tools=[MCP])
        assert [body["tools"] for body in it.sent] == [[MCP], [MCP]]
        sent_request, sent_approval = (item for item in it.sent[1]["input"] if item["type"].startswith("mcp_"))
    assert (request_item["type"], request_item["name"], request_item["arguments"]) == (
        "mcp_approval_request",
        "f",
        "{}",
    )
    assert (sent_request["id"], sent_approval["approval_request_id"], sent_approval["approve"]) == (
        request_item["id"],
        request_item["id"],
        True,
    )


@pytest.mark.parametrize("server", ["vllm", "gemini"])
async def test_pain_h_71_and_h_75_unsupported_mcp_tool_is_rejected_by_name(server: str) -> None:
    """BerriAI/litellm#13597, ogx-ai/ogx#3443"""
    async with bridge(server=server) as it:
        answer = await it.post("/v1/responses", {"model": "m", "input": "hi", "tools": [MCP]})
        assert it.sent == []
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "unsupported_tool", "tools[0]")
    assert "mcp" in error["message"]


async def ask_all(backends: Any, models: Any, *names: str) -> list[Json]:
    """Return the responses of several model names to one input."""
    running = await asyncio.to_thread(LiveServer, {}, make_settings(models=models), others=backends)
    try:
        bodies = ({"model": name, "input": "hi"} for name in names)
        return [(await asyncio.to_thread(running.ask, "POST", "/v1/responses", body)).json for body in bodies]
    finally:
        await asyncio.to_thread(running.stop)


async def test_pain_j_81_served_by_names_the_backend_behind_an_alias_or_fallback() -> None:
    """BerriAI/litellm#25503"""
    down = json_of({"error": {"message": "Out of order."}}, 503)
    async with serve([down]) as first, serve([recorded("text")] * 3) as second:
        backends = {
            name: create(
                "chat_completions",
                name=name,
                options={"base_url": upstream.url, "models": ["m"]} | NO_RETRIES,
                data_dir=Path("unused"),
            )
            for name, upstream in (("one", first), ("two", second))
        }
        models = {"best": ["one/m", "two/m"], "alias": ["two/m"], "any-*": ["two/m"]}
        responses = await ask_all(backends, models, "best", "alias", "any-thing")
    assert [(each["model"], each["served_by"]) for each in responses] == [("m", "two/m")] * 3


async def test_pain_j_81_served_by_names_the_model_chosen_by_a_router() -> None:
    """BerriAI/litellm#25503"""
    chunks = [
        {"model": "acme/model-1", "choices": [{"delta": {"content": "Hi."}}]},
        {"model": "acme/model-1", "choices": [{"finish_reason": "stop"}]},
    ]
    chosen = stream_of(*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks), b"data: [DONE]\n\n")
    begun = {"type": "response.created", "response": {"id": "resp_up", "model": "acme/model-1"}}
    snapshot = stream_of(f"data: {json.dumps(begun)}\n\n".encode(), *(answered().pieces or ()))
    for kind, reply in (("chat_completions", chosen), ("responses", snapshot)):
        async with bridge(reply, kind=kind, model="router/auto") as it:
            answer = await it.post("/v1/responses", {"model": "router/auto", "input": "hi"})
            response = answer.json
            stored = await it.get(f"/v1/responses/{response['id']}")
        assert (response["model"], response["served_by"]) == ("router/auto", "up/acme/model-1")
        assert answer.headers["x-antiphon-served-by"] == response["served_by"]
        assert stored["served_by"] == response["served_by"]
