"""How a model is asked to think."""

import json
from typing import Any

import pytest

HELLO = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "name": "f"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
ADAPTIVE = {"type": "adaptive", "display": "summarized"}


def ask(write: Any, model: str, effort: str | None, *items: Any, **more: Any) -> tuple[Any, Any, int]:
    body = write(*(items or [HELLO]), model=model, reasoning={"effort": effort}, **more)
    return body.get("thinking"), body.get("output_config"), body["max_tokens"]


@pytest.mark.parametrize(
    ("model", "effort", "thinking", "output", "longest"),
    [
        ("claude-3-5-haiku-20241022", "high", None, None, 8192),
        ("claude-sonnet-4-20250514", "minimal", {"type": "enabled", "budget_tokens": 1024}, None, 17_024),
        ("claude-sonnet-4-20250514", "max", {"type": "enabled", "budget_tokens": 31_488}, None, 32_000),
        ("claude-haiku-4-5", "medium", {"type": "enabled", "budget_tokens": 8192}, None, 40_192),
        ("claude-haiku-4-5", "none", None, None, 32_000),
        ("claude-opus-4-6", "xhigh", ADAPTIVE, {"effort": "high"}, 32_000),
        ("claude-opus-4-6", "max", ADAPTIVE, {"effort": "max"}, 32_000),
        ("claude-opus-4-7", "xhigh", ADAPTIVE, {"effort": "xhigh"}, 32_000),
        ("claude-opus-4-7", "none", None, None, 32_000),
        ("claude-sonnet-5", "minimal", ADAPTIVE, {"effort": "low"}, 32_000),
        ("claude-sonnet-5", "none", {"type": "disabled"}, None, 32_000),
        ("claude-sonnet-5-5", "none", {"type": "between_tools"}, None, 32_000),
        ("claude-opus-5-5", "none", None, {"effort": "low"}, 32_000),
        ("some-other-model", "low", {"type": "enabled", "budget_tokens": 2048}, None, 10_240),
    ],
)
def test_each_model_is_asked_in_its_way(
    write: Any, model: str, effort: str, thinking: Any, output: Any, longest: int
) -> None:
    assert ask(write, model, effort) == (thinking, output, longest)


@pytest.mark.parametrize("reasoning", [None, {}, {"effort": None}])
def test_a_model_that_nobody_asks_decides_itself(write: Any, reasoning: Any) -> None:
    body = write(HELLO, model="claude-opus-5", reasoning=reasoning)
    assert ("thinking" in body, "output_config" in body) == (False, False)


def test_who_wants_to_see_the_reasoning_wants_it_done(write: Any) -> None:
    new = write(HELLO, model="claude-opus-5", reasoning={"summary": "auto"})
    old = write(HELLO, model="claude-sonnet-4-5", reasoning={"summary": "auto"})
    assert (new["thinking"], new.get("output_config")) == (ADAPTIVE, None)
    assert old["thinking"] == {"type": "enabled", "budget_tokens": 8192}


@pytest.mark.parametrize(
    ("longest", "thinking"),
    [
        (20_000, {"type": "enabled", "budget_tokens": 16_384}),
        (4000, {"type": "enabled", "budget_tokens": 3488}),
        (1536, {"type": "enabled", "budget_tokens": 1024}),
        (1535, None),
    ],
)
def test_a_budget_leaves_room_for_the_answer(write: Any, longest: int, thinking: Any) -> None:
    asked = ask(write, "claude-sonnet-4-5", "high", max_output_tokens=longest)
    assert asked == (thinking, None, longest)


@pytest.mark.parametrize(
    ("model", "thinking", "output"),
    [
        ("claude-sonnet-4-5", None, None),
        ("claude-opus-4-7", None, {"effort": "high"}),
        ("claude-opus-4-8", ADAPTIVE, {"effort": "high"}),
    ],
)
def test_a_model_that_must_call_a_tool_thinks_only_if_it_can(
    write: Any, model: str, thinking: Any, output: Any
) -> None:
    assert ask(write, model, "high", tools=[TOOL], tool_choice="required")[:2] == (thinking, output)


def loop(*first: Any) -> list[Any]:
    """Two rounds of calls, of which the first begins with these items."""
    calls = [
        [
            {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": call_id, "output": "ok"},
        ]
        for call_id in "ab"
    ]
    return [HELLO, *first, *calls[0], *calls[1]]


def test_a_budget_goes_on_only_where_the_calls_began_with_thinking(write: Any) -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": json.dumps([THOUGHT])}
    asked = [ask(write, "claude-sonnet-4-5", "low", *items)[0] for items in (loop(sealed), loop(), [*loop(), HELLO])]
    budget = {"type": "enabled", "budget_tokens": 2048}
    assert asked == [budget, None, None]
    answered = [*loop(), {"role": "assistant", "content": "Done."}, HELLO]
    assert ask(write, "claude-sonnet-4-5", "low", *answered)[0] == budget


@pytest.mark.parametrize(
    ("model", "parameters", "sampling"),
    [
        ("claude-sonnet-4-5", {"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5}),
        ("claude-sonnet-4-5", {"temperature": 1.7}, {"temperature": 1.0}),
        ("claude-sonnet-4-5", {"temperature": 1, "top_p": 0.9}, {"top_p": 0.9}),
        ("claude-sonnet-4-5", {"temperature": 0}, {"temperature": 0.0}),
        ("claude-sonnet-4-5", {"temperature": 0.5, "reasoning": {"effort": "low"}}, {}),
        ("claude-opus-4-6", {"temperature": 0.5}, {"temperature": 0.5}),
        ("claude-opus-4-7", {"temperature": 0.5, "top_p": 0.5}, {}),
    ],
)
def test_a_temperature_goes_only_to_models_that_take_it(write: Any, model: str, parameters: Any, sampling: Any) -> None:
    body = write(HELLO, model=model, **parameters)
    assert {name: body[name] for name in ("temperature", "top_p") if name in body} == sampling
