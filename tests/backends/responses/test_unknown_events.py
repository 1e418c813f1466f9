"""Unknown events and fields of items that are not open yet, or not any more."""

import json
from typing import Any

import pytest

from antiphon.backends.responses.reader import ResponsesReader
from support.replay import replay

GLOW = {"type": "acme.glow", "item_id": "i", "output_index": 0}
MESSAGE = {"type": "message", "id": "i", "role": "assistant", "status": "completed"}
THOUGHT = {"type": "reasoning", "id": "i", "summary": []}
CALL = {"type": "function_call", "id": "i", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("item", "before_item"),
    [
        (MESSAGE | {"content": [{"type": "output_text", "text": "a", "annotations": []}]}, False),
        (MESSAGE | {"content": [{"type": "output_text", "text": "a", "annotations": []}]}, True),
        (MESSAGE | {"content": []}, False),
        (THOUGHT | {"content": [{"type": "reasoning_text", "text": "a"}]}, False),
        (THOUGHT | {"encrypted_content": "e"}, True),
        (THOUGHT, False),
        (CALL, True),
    ],
    ids=["text", "text, early", "no text", "reasoning", "seal, early", "no reasoning", "call, early"],
)
@pytest.mark.parametrize("has_delta", [False, True])
def test_unknown_event_before_the_first_text_is_forwarded(
    item: dict[str, Any], before_item: bool, has_delta: bool
) -> None:
    added = {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}}
    kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
    deltas = [{"type": f"response.{kind}.delta", "item_id": "i", "output_index": 0, "delta": "a"}]
    events = [
        *([GLOW, added] if before_item else [added, GLOW]),
        *(deltas if has_delta and item.get("content") else ()),
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "resp_up", "status": "completed", "output": [item]}},
    ]
    raw = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    emitted = replay(ResponsesReader, [raw])
    types = [event["type"] for event in emitted if event.get("output_index") == 0]
    [glow] = [event for event in emitted if event["type"] == "acme.glow"]
    [first, *_, last] = [event for event in emitted if event.get("output_index") == 0]
    assert (types[0], types[-1]) == ("response.output_item.added", "response.output_item.done")
    assert glow["item_id"] == first["item"]["id"] == last["item"]["id"] != "i"
    assert [event["sequence_number"] for event in emitted] == list(range(len(emitted)))
    content = emitted[-1]["response"]["output"][0].get("content") or []
    assert [part["text"] for part in content] == [part["text"] for part in item.get("content", ())]


def test_call_that_ends_after_the_next_one_began_keeps_its_fields() -> None:
    """Servers such as LiteLLM end all calls at the end of the answer."""
    f, g = CALL | {"arguments": ""}, CALL | {"arguments": "", "id": "j", "call_id": "d"}
    ended = [item | {"arguments": "{}", "status": "completed", "provider_specific_fields": {"a": 1}} for item in (f, g)]
    events = [
        {"type": "response.output_item.added", "output_index": 0, "item": f},
        {"type": "response.function_call_arguments.delta", "output_index": 0, "item_id": "i", "delta": "{}"},
        {"type": "response.output_item.added", "output_index": 1, "item": g},
        {"type": "response.function_call_arguments.delta", "output_index": 1, "item_id": "j", "delta": "{}"},
        *(
            {"type": "response.output_item.done", "output_index": index, "item": item}
            for index, item in enumerate(ended)
        ),
        {"type": "response.completed", "response": {"id": "resp_up", "status": "completed", "output": ended}},
    ]
    emitted = replay(ResponsesReader, [b"data: %b\n\n" % json.dumps(event).encode() for event in events])
    assert emitted[-1]["response"]["output"] == [ended[0] | {"id": "fc_0"}, ended[1] | {"id": "fc_1"}]
