"""Recorded streams in the variants that servers send. A JSON file beside each has the expected response."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.chat_completions.quirks import find_quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.protocol.response import Usage
from support.replay import cut, find_harmful_cuts, replay

CORPUS = Path(__file__).parents[2] / "wire" / "chat"
NAMES = sorted(path.stem for path in CORPUS.glob("*.sse"))


def guess(answer: str) -> Usage:
    return Usage(0, len(answer), len(answer), estimated=True)


def load(name: str) -> tuple[bytes, dict[str, Any], Callable[[], ChatReader]]:
    expected = json.loads((CORPUS / f"{name}.json").read_text("utf-8"))
    server, changes = expected.pop("server", None), expected.pop("quirks", {})
    quirks = find_quirks("test", "http://127.0.0.1/v1", server=server, changes=changes)
    return (CORPUS / f"{name}.sse").read_bytes(), expected, partial(ChatReader, quirks, estimate=guess)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_stream_gives_the_expected_response(name: str) -> None:
    raw, expected, make_reader = load(name)
    response = replay(make_reader, [raw])[-1]["response"]
    fields = {"status", "output", "usage", *expected}
    assert {field: response[field] for field in fields} == expected
    assert response["error"] == expected.get("error")


def test_s3_10_text_is_a_message_and_call_is_an_item() -> None:
    """The stateless server, which this contract is about, omits the empty `logprobs`."""
    raw, _, make_reader = load("text_and_call")
    assert replay(make_reader, [raw])[-1]["response"]["output"] == [
        {
            "type": "message",
            "id": "msg_0",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
            "status": "completed",
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_a",
            "name": "look_up",
            "arguments": '{"q":1}',
            "status": "completed",
        },
    ]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_stream_is_the_same_at_any_boundary(name: str) -> None:
    raw, _, make_reader = load(name)
    assert find_harmful_cuts(raw) == []
    assert replay(make_reader, cut(raw, *range(1, len(raw)))) == replay(make_reader, [raw])
