"""Content parts and annotations of every type are accepted and returned unchanged."""

from typing import Any

import pytest

from behaviour.samples import ANNOTATIONS, PARTS
from behaviour.wire import ask, get, list_input, of_type, stream
from manifest import names

Item = dict[str, Any]
CALL: Item = {"type": "computer_call", "id": "cu_1", "call_id": "c", "status": "completed", "pending_safety_checks": []}


def make_message(role: str, part: Item) -> list[Item]:
    return [{"type": "message", "id": "msg_1", "role": role, "status": "completed", "content": [part]}]


def make_items(name: str) -> list[Item]:
    """Return items that contain this part."""
    part = PARTS[name]
    match name:
        case "computer_screenshot":
            return [
                CALL,
                {"type": "computer_call_output", "id": "cuo_1", "call_id": "c", "status": "completed", "output": part},
            ]
        case "summary_text":
            return [{"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [part]}]
        case "reasoning_text":
            return [{"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [], "content": [part]}]
        case "output_text" | "refusal":
            return make_message("assistant", part)
        case _:
            return make_message("user", part)


@pytest.mark.parametrize("name", [name for name in names("parts") if name not in ANNOTATIONS])
def test_input_is_returned_unchanged(server: Any, name: str) -> None:
    assert list_input(server, ask(server, make_items(name))) == make_items(name)


@pytest.mark.parametrize("name", [name for name in names("parts") if name in ANNOTATIONS])
def test_annotation_is_returned_unchanged(server: Any, name: str) -> None:
    sent = make_message("assistant", {"type": "output_text", "text": "t", "annotations": [ANNOTATIONS[name]]})
    assert list_input(server, ask(server, sent)) == sent


@pytest.mark.parametrize("name", [name for name in names("parts") if name in ANNOTATIONS])
def test_annotation_of_the_model_is_sent_and_stored(server: Any, name: str) -> None:
    events = stream(server, f"cite {name}!")
    (event,) = of_type(events, "response.output_text.annotation.added")
    stored = get(server, f"/responses/{events[-1]['response']['id']}")["output"][0]["content"][0]["annotations"]
    assert (event["annotation"], stored) == (ANNOTATIONS[name], [ANNOTATIONS[name]])
