"""Complaints F59 to F61: compaction that is missing or lost."""

import json
from typing import Any

import pytest

from behaviour.upstreams import bridge, refuse, streamed
from behaviour.wire import ask, of_type, say, stream, text_of

# As Codex sends it: instructions first, then the messages, and the trigger last.
HISTORY = [say("developer", "You are a coding agent."), say("user", "my name is ada"), say("assistant", "hello ada")]
TRIGGER = {"type": "compaction_trigger"}


def test_pain_f_59_session_continues_after_compaction(server: Any) -> None:
    """caozhiyuan/copilot-api#359"""
    answer = server.ask("POST", "/v1/responses/compact", {"model": "scripted", "input": HISTORY, "instructions": "x"})
    assert (answer.status, answer.json["object"]) == (200, "response.compaction")
    assert text_of(ask(server, [*answer.json["output"], say("user", "recall")])) == "Your name is ada."


def test_pain_f_60_trigger_gives_exactly_one_compaction(server: Any) -> None:
    """router-for-me/CLIProxyAPI#4848, #5857"""
    for store in (True, False):
        events = stream(server, [*HISTORY, TRIGGER], store=store, tools=[], parallel_tool_calls=True)
        (done,) = of_type(events, "response.output_item.done")
        assert done["item"]["type"] == "compaction"
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["output"] == [done["item"]]


def test_pain_f_61_compaction_item_contains_the_history(server: Any) -> None:
    """QuantumNous/new-api#5965, qxcnm/Codex-Manager#48, lidge-jun/opencodex#2833"""
    (item,) = ask(server, [*HISTORY, TRIGGER], store=False)["output"]
    assert item["encrypted_content"]
    # Codex puts its instructions in front again and continues from the item.
    assert text_of(ask(server, [HISTORY[0], item, say("user", "recall")], store=False)) == "Your name is ada."


WINDOW = 4_000
LONG = [
    say("user", "my name is ada"),
    *(say("assistant", "and so on " * 1_000) for _ in range(20)),
    say("user", "go on"),
]


@pytest.mark.parametrize("known", [True, False])
async def test_pain_f_61_compaction_fits_the_window_of_an_unlisted_model(
    known: bool,
) -> None:
    """QuantumNous/new-api#5965, qxcnm/Codex-Manager#48, lidge-jun/opencodex#2833"""
    refused = refuse(f"This model's maximum context length is {WINDOW} tokens.", code="context_length_exceeded")
    replies = [streamed({"content": "Her name is ada."}), streamed({"content": "Hello ada."})]
    options: dict[str, Any] = {"models": None, "context_window": WINDOW if known else None}
    async with bridge(*([] if known else [refused]), *replies, **options) as it:
        compacted = await it.ask([*LONG, TRIGGER], store=False)
        response = await it.ask([*compacted["output"], say("user", "recall")], store=False)
        *_, summary_request, request = it.sent
    assert (response["status"], text_of(response)) == ("completed", "Hello ada.")
    assert "Her name is ada." in json.dumps(request["messages"])
    assert len(json.dumps(summary_request["messages"])) < 4 * WINDOW
    assert len(json.dumps(request["messages"])) < 4 * WINDOW
