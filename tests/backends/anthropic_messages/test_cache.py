"""What the upstream is asked to remember."""

from typing import Any

import pytest

TOOLS = [{"type": "function", "name": "a"}, {"type": "function", "name": "b"}]
SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_text", "text": text, **more}


def find_marks(body: dict[str, Any]) -> dict[str, Any]:
    """The marks, by the text or name of what is marked."""
    blocks = [*body.get("system", ()), *body.get("tools", ())]
    blocks += [block for message in body["messages"] for block in message["content"]]
    marked = [block for block in blocks if "cache_control" in block]
    return {block.get("text") or block.get("name") or block["tool_use_id"]: block["cache_control"] for block in marked}


CHAT = (
    {"role": "user", "content": [part("1"), part("2")]},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "4"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "6"},
)


def test_nothing_is_marked_unasked(write: Any) -> None:
    assert find_marks(write(*CHAT, tools=TOOLS, instructions="S")) == {}


@pytest.mark.parametrize(
    ("parameters", "mark"),
    [
        ({"prompt_cache_key": "k"}, SHORT),
        ({"prompt_cache_retention": "in_memory"}, SHORT),
        ({"prompt_cache_options": {"ttl": "30m"}}, SHORT),
        ({"prompt_cache_retention": "24h"}, LONG),
        ({"prompt_cache_key": "k", "prompt_cache_options": {"ttl": "12h"}}, LONG),
    ],
)
def test_whoever_asks_for_caching_gets_the_usual_marks(write: Any, parameters: Any, mark: Any) -> None:
    body = write(*CHAT, tools=TOOLS, instructions="S", **parameters)
    assert find_marks(body) == {"S": mark, "b": mark, "4": mark, "6": mark}


def mark_part(text: str, ttl: str | None = None) -> dict[str, Any]:
    return {"role": "user", "content": [part(text, prompt_cache_breakpoint={"mode": "explicit", "ttl": ttl})]}


def test_marks_of_the_request_come_first(write: Any) -> None:
    body = write(mark_part("1"), *CHAT[1:], tools=TOOLS, instructions="S", prompt_cache_key="k")
    assert find_marks(body) == {"S": SHORT, "b": SHORT, "1": SHORT, "6": SHORT}


def test_explicit_marks_are_the_only_ones(write: Any) -> None:
    system = {**mark_part("S"), "role": "developer"}
    result = {"type": "function_call_output", "call_id": "c", "output": mark_part("out")["content"]}
    call = {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"}
    options = {"mode": "explicit"}
    body = write(system, mark_part("1"), call, result, tools=TOOLS, prompt_cache_key="k", prompt_cache_options=options)
    assert find_marks(body) == {"S": SHORT, "1": SHORT, "c": SHORT}


def test_the_last_four_marks_count_and_share_the_longest_time(write: Any) -> None:
    body = write(*(mark_part(text, "12h" if text == "5" else None) for text in "12345"))
    assert find_marks(body) == dict.fromkeys("2345", LONG)
