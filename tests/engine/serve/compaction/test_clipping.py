"""Making items smaller."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.serve.compaction.clipping import clip_item, clip_text, measure_item, measure_smallest
from antiphon.protocol import hosted
from antiphon.protocol.content import ComputerScreenshot, InputImage, InputText, OutputText
from antiphon.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from support.compaction import user

LONG = "the bridge is red. " * 500
SIZE = 1000


@settings(max_examples=80)
@given(st.text(max_size=400), st.integers(-1, 300))
def test_a_clipped_text_is_never_longer_than_it_may_be(text: str, size: int) -> None:
    clipped = clip_text(text, size)
    assert len(clipped) <= max(size, 0) or clipped == text == ""


def test_a_clipped_text_has_its_beginning_its_end_and_the_number_of_what_is_gone() -> None:
    clipped = clip_text("a" * 500 + "b" * 500, 200)
    head, note, tail = clipped.splitlines()
    assert (set(head), set(tail)) == ({"a"}, {"b"})
    assert note == f"[... {1000 - len(head) - len(tail)} characters were cut here ...]"


def test_what_is_small_enough_stays_as_it_is() -> None:
    item = user("hi")
    assert clip_item(item, SIZE) is item


CLIPPED: list[Any] = [
    Message("user", LONG),
    Message("assistant", [OutputText(LONG), OutputText(LONG)]),
    FunctionCallOutput(LONG, "c"),
    CustomToolCallOutput("c", [InputText(LONG)]),
    FunctionCall("c", "f", json.dumps({"text": LONG})),
    CustomToolCall("c", "f", LONG),
    hosted.ShellCallOutput("c", [hosted.ShellOutput(LONG, LONG, {"type": "exit", "exit_code": 0})]),
    hosted.LocalShellCallOutput("c", LONG),
    hosted.ApplyPatchCallOutput("c", "completed", output=LONG),
    hosted.McpCall("m", "{}", "f", "acme", output=LONG),
    hosted.ProgramOutput("p", "c", LONG, "completed"),
    hosted.ImageGenerationCall("i", "completed", result=LONG),
]


@pytest.mark.parametrize("item", CLIPPED, ids=lambda item: getattr(item, "role", item.type))
def test_a_large_item_is_made_smaller_and_stays_what_it_was(item: Item) -> None:
    clipped = clip_item(item, SIZE)
    assert type(clipped) is type(item)
    assert clipped is not None
    assert measure_item(clipped) <= SIZE + 200
    assert getattr(clipped, "call_id", None) == getattr(item, "call_id", None)


def test_clipped_arguments_are_still_a_json_object() -> None:
    clipped = clip_item(FunctionCall("c", "f", json.dumps({"text": '"\n' * 4000})), SIZE)
    assert isinstance(clipped, FunctionCall)
    assert list(json.loads(clipped.arguments)) == ["clipped"]


@pytest.mark.parametrize(
    "item",
    [
        Reasoning(id="rs_1", encrypted_content=LONG),
        hosted.ComputerCall("cu", "c", [], "completed", {"type": "type", "text": LONG}),
        hosted.ComputerCallOutput("c", ComputerScreenshot(image_url="data:,")),
    ],
    ids=lambda item: item.type,
)
def test_what_cannot_be_made_smaller_is_told_so(item: Item) -> None:
    assert clip_item(item, SIZE) is None


RIGID = hosted.ComputerCallOutput("c", ComputerScreenshot(image_url="data:,"))


@pytest.mark.parametrize("item", [*CLIPPED, RIGID, user("hi"), FunctionCallOutput(LONG, "c" * 900)])
def test_an_item_can_always_be_made_as_small_as_it_is_told_to_become(item: Item) -> None:
    least = measure_smallest(item)
    assert least <= measure_item(item)
    clipped = clip_item(item, least)
    assert clipped is not None
    assert measure_item(clipped) <= least + 200


def test_what_has_no_text_to_cut_is_as_small_as_it_can_be() -> None:
    assert measure_smallest(RIGID) == measure_item(RIGID)


def test_an_image_counts_the_same_however_long_its_data_is() -> None:
    small, large = (Message("user", [InputImage(image_url=f"data:,{'x' * size}")]) for size in (1, 10**6))
    assert measure_item(small) == measure_item(large)


def test_an_image_that_has_no_room_is_noted() -> None:
    message = Message("user", [InputText("look"), InputImage(image_url="data:,")])
    assert clip_item(message, SIZE) == Message("user", [InputText("look\n[an input_image was left out]")])
