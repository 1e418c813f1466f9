"""Clipping of items."""

import json
from typing import Any

import pytest
from hypothesis import given
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


@given(st.text(max_size=400), st.integers(-1, 300))
def test_clipped_text_is_within_the_limit(text: str, size: int) -> None:
    clipped = clip_text(text, size)
    assert len(clipped) <= max(size, 0) or clipped == text == ""


def test_clipped_text_has_both_ends_and_the_number_cut() -> None:
    clipped = clip_text("a" * 500 + "b" * 500, 200)
    head, note, tail = clipped.splitlines()
    assert (set(head), set(tail)) == ({"a"}, {"b"})
    assert note == f"[... {1000 - len(head) - len(tail)} characters were cut here ...]"


def test_small_item_stays_unchanged() -> None:
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
    hosted.McpCall("{}", "f", "acme", "m", output=LONG),
    hosted.ProgramOutput("c", LONG, "p", "completed"),
    hosted.ImageGenerationCall("i", "completed", result=LONG),
]


@pytest.mark.parametrize("item", CLIPPED, ids=lambda item: getattr(item, "role", item.type))
def test_large_item_is_clipped_and_keeps_its_type(item: Item) -> None:
    clipped = clip_item(item, SIZE)
    assert type(clipped) is type(item)
    assert clipped is not None
    assert measure_item(clipped) <= SIZE + 200
    assert getattr(clipped, "call_id", None) == getattr(item, "call_id", None)


def test_clipped_arguments_are_a_json_object() -> None:
    clipped = clip_item(FunctionCall("c", "f", json.dumps({"text": '"\n' * 4000})), SIZE)
    assert isinstance(clipped, FunctionCall)
    assert list(json.loads(clipped.arguments)) == ["clipped"]


@pytest.mark.parametrize(
    "item",
    [
        Reasoning(id="rs_1", encrypted_content=LONG),
        hosted.ComputerCall("c", [], "cu", "completed", {"type": "type", "text": LONG}),
        hosted.ComputerCallOutput("c", ComputerScreenshot(image_url="data:,")),
    ],
    ids=lambda item: item.type,
)
def test_item_without_text_cannot_be_clipped(item: Item) -> None:
    assert clip_item(item, SIZE) is None


RIGID = hosted.ComputerCallOutput("c", ComputerScreenshot(image_url="data:,"))


@pytest.mark.parametrize("item", [*CLIPPED, RIGID, user("hi"), FunctionCallOutput(LONG, "c" * 900)])
def test_item_can_be_clipped_to_its_measured_minimum(item: Item) -> None:
    least = measure_smallest(item)
    assert least <= measure_item(item)
    clipped = clip_item(item, least)
    assert clipped is not None
    assert measure_item(clipped) <= least + 200


def test_minimum_of_an_item_without_text_is_its_size() -> None:
    assert measure_smallest(RIGID) == measure_item(RIGID)


def test_image_size_does_not_depend_on_its_data() -> None:
    small, large = (Message("user", [InputImage(image_url=f"data:,{'x' * size}")]) for size in (1, 10**6))
    assert measure_item(small) == measure_item(large)


def test_dropped_image_leaves_a_note() -> None:
    message = Message("user", [InputText("look"), InputImage(image_url="data:,")])
    assert clip_item(message, SIZE) == Message("user", [InputText("look\n[an input_image was left out]")])
