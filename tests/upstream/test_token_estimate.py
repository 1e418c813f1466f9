"""Token estimates."""

import json
from typing import Any

import pytest

from antiphon.protocol.codec import decode_request
from antiphon.upstream.token_estimate import TOKENS_PER_FILE, TOKENS_PER_IMAGE, TOKENS_PER_ITEM, estimate_tokens

NOTHING = TOKENS_PER_ITEM


def estimate(items: list[Any], **request: Any) -> int:
    decoded = decode_request(json.dumps({"model": "m", "input": items, **request}).encode()).body
    assert isinstance(decoded.input, list)
    return estimate_tokens(decoded, list(decoded.input))


def message(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, Any]:
    return {"type": "input_text", "text": words}


PIXEL = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 100_000}
FILE = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64," + "A" * 100_000}


@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        ("The quick brown fox jumps over the lazy dog. " * 10, 100, 150),  # 100 for GPT-4o
        ("素早い茶色の狐がのろまな犬を飛び越える。" * 10, 150, 220),
        ("Съешь же ещё этих мягких французских булок. " * 10, 130, 320),
        ("🦊" * 10, 10, 30),
        ("", 0, 8),
    ],
)
def test_text_estimate_depends_on_length_and_script(words: str, least: int, most: int) -> None:
    counted = estimate([message(text(words))]) - NOTHING - TOKENS_PER_ITEM
    assert least <= counted <= most


def test_image_and_file_have_a_flat_estimate() -> None:
    bare = estimate([message(text("x"))])
    assert estimate([message(text("x"), PIXEL)]) == bare + TOKENS_PER_IMAGE
    assert estimate([message(text("x"), FILE)]) == bare + TOKENS_PER_FILE


def test_estimate_includes_instructions_tools_and_schemas() -> None:
    bare = estimate([])
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
    schema = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    counts = [
        estimate([], instructions="Be brief and kind."),
        estimate([], tools=[tool]),
        estimate([], text=schema),
    ]
    assert [count > bare + 4 for count in counts] == [True] * 3


def test_estimate_includes_calls_but_not_unread_fields() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "x" * 350}
    output = {"type": "function_call_output", "call_id": "c", "output": "y" * 350}
    assert estimate([call, output]) > 200
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "z" * 35_000}
    assert estimate([sealed]) < 50


def test_estimate_includes_unknown_items() -> None:
    assert estimate([{"type": "acme:note", "text": "x" * 350}]) > 100


def test_empty_turn_has_a_small_estimate() -> None:
    assert estimate([]) == NOTHING
