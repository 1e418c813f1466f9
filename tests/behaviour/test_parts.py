"""Content parts and annotations of every type: in as they are, and back as they were."""

from typing import Any

import pytest

from behaviour.samples import ANNOTATIONS, PARTS
from behaviour.wire import ask, get, list_input, of_type, stream
from manifest import names

Item = dict[str, Any]
CALL: Item = {"type": "computer_call", "id": "cu_1", "call_id": "c", "status": "completed", "pending_safety_checks": []}


def say(role: str, part: Item) -> list[Item]:
    return [{"type": "message", "id": "msg_1", "role": role, "status": "completed", "content": [part]}]


def hold(name: str) -> list[Item]:
    """Items with this part in its place."""
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
            return say("assistant", part)
        case _:
            return say("user", part)


@pytest.mark.parametrize("name", [name for name in names("parts") if name not in ANNOTATIONS])
def test_it_goes_in_and_comes_back_as_it_was(server: Any, name: str) -> None:
    assert list_input(server, ask(server, hold(name))) == hold(name)


@pytest.mark.parametrize("name", [name for name in names("parts") if name in ANNOTATIONS])
def test_an_annotation_goes_in_and_comes_back_as_it_was(server: Any, name: str) -> None:
    sent = say("assistant", {"type": "output_text", "text": "t", "annotations": [ANNOTATIONS[name]]})
    assert list_input(server, ask(server, sent)) == sent


@pytest.mark.parametrize("name", [name for name in names("parts") if name in ANNOTATIONS])
def test_an_annotation_of_the_model_is_told_and_kept(server: Any, name: str) -> None:
    events = stream(server, f"cite {name}!")
    (told,) = of_type(events, "response.output_text.annotation.added")
    kept = get(server, f"/responses/{events[-1]['response']['id']}")["output"][0]["content"][0]["annotations"]
    assert (told["annotation"], kept) == (ANNOTATIONS[name], [ANNOTATIONS[name]])
