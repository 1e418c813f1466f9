"""Translation of requests: parameters, thinking, tools and prompt caching."""

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.anthropic_messages.backend import create
from antiphon.protocol import codec

HELLO = {"role": "user", "content": "Hi"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}


def test_plain_request_has_only_required_fields(write_body: Any) -> None:
    assert write_body(HELLO) == {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32_000,
        "stream": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    }


def test_max_output_tokens_becomes_max_tokens(write_body: Any) -> None:
    assert write_body(HELLO, max_output_tokens=7)["max_tokens"] == 7


@pytest.mark.parametrize(
    ("tier", "written"),
    [("auto", "auto"), ("default", "standard_only"), ("flex", "standard_only"), ("priority", "auto"), (None, None)],
)
def test_service_tier_is_mapped(write_body: Any, tier: str | None, written: str | None) -> None:
    assert write_body(HELLO, service_tier=tier).get("service_tier") == written


@pytest.mark.parametrize(
    ("parameters", "metadata"),
    [
        ({"safety_identifier": "s", "user": "u"}, {"user_id": "s"}),
        ({"user": "u"}, {"user_id": "u"}),
        ({"metadata": {"k": "v"}}, None),
    ],
)
def test_user_id_is_the_safety_identifier_or_user(write_body: Any, parameters: Any, metadata: Any) -> None:
    assert write_body(HELLO, **parameters).get("metadata") == metadata


def test_output_schema_is_sent_as_format(write_body: Any) -> None:
    body = write_body(HELLO, text={"format": FORMAT}, reasoning={"effort": "high"}, model="claude-opus-5")
    assert body["output_config"] == {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}
    assert "system" not in body


@pytest.mark.parametrize(
    ("model", "schema"),
    [("claude-opus-4-1", SCHEMA), ("claude-opus-5", {"type": "object", "additionalProperties": {"type": "string"}})],
)
def test_unenforceable_schema_becomes_instruction(write_body: Any, model: str, schema: Any) -> None:
    body = write_body(HELLO, text={"format": {**FORMAT, "schema": schema}}, model=model)
    assert "output_config" not in body
    assert '"type": "object"' in body["system"][0]["text"]


def test_json_object_and_verbosity_become_instructions(write_body: Any) -> None:
    body = write_body(HELLO, text={"format": {"type": "json_object"}, "verbosity": "low"}, instructions="Be kind.")
    assert [block["text"] for block in body["system"]] == [
        "Be kind.",
        "Keep your answers short.",
        "Answer with a JSON object and nothing else.",
    ]


META = ["client_metadata"]


@pytest.mark.parametrize(
    ("model", "ignored"),
    [
        ("claude-3-5-haiku", [["top_p"], ["top_p", "reasoning.effort"], ["top_p", "reasoning.effort"], [], META]),
        ("claude-sonnet-4-5", [["top_p"], ["temperature", "top_p"], ["top_p"], [], META]),
        ("claude-opus-5", [["temperature", "top_p"], ["temperature", "top_p"], ["temperature", "top_p"], [], META]),
    ],
)
def test_ignored_params_are_listed(tmp_path: Path, model: str, ignored: list[list[str]]) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.5, "text": {"verbosity": "low"}}
    thinking = {"reasoning": {"effort": "low"}}
    parameter_sets = [
        sampling,
        sampling | thinking,
        sampling | thinking | {"tool_choice": "required"},
        {"temperature": 1, "top_p": 1, "reasoning": {"effort": "none"}},
        {"client_metadata": {"session": "s"}, "user": "u", "prompt_cache_key": "k"},
    ]
    requests = [
        codec.decode_request(codec.encode({"model": model, "input": "Hi"} | each)).body for each in parameter_sets
    ]
    list_ignored = create("claude", {}, tmp_path).capabilities.list_ignored
    assert list_ignored is not None
    assert [list_ignored(each, model) for each in requests] == ignored


# Thinking

TOOL = {"type": "function", "name": "f"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
ADAPTIVE = {"type": "adaptive", "display": "summarized"}


def read_limits(write_body: Any, model: str, effort: str | None, *items: Any, **more: Any) -> tuple[Any, Any, int]:
    body = write_body(*(items or [HELLO]), model=model, reasoning={"effort": effort}, **more)
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
def test_effort_is_mapped_by_model_traits(
    write_body: Any, model: str, effort: str, thinking: Any, output: Any, longest: int
) -> None:
    assert read_limits(write_body, model, effort) == (thinking, output, longest)


@pytest.mark.parametrize("reasoning", [None, {}, {"effort": None}])
def test_request_without_effort_sends_no_thinking(write_body: Any, reasoning: Any) -> None:
    body = write_body(HELLO, model="claude-opus-5", reasoning=reasoning)
    assert ("thinking" in body, "output_config" in body) == (False, False)


def test_reasoning_summary_enables_thinking(write_body: Any) -> None:
    new = write_body(HELLO, model="claude-opus-5", reasoning={"summary": "auto"})
    old = write_body(HELLO, model="claude-sonnet-4-5", reasoning={"summary": "auto"})
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
def test_thinking_budget_leaves_room_for_the_answer(write_body: Any, longest: int, thinking: Any) -> None:
    limits = read_limits(write_body, "claude-sonnet-4-5", "high", max_output_tokens=longest)
    assert limits == (thinking, None, longest)


@pytest.mark.parametrize(
    ("model", "thinking", "output"),
    [
        ("claude-sonnet-4-5", None, None),
        ("claude-opus-4-7", None, {"effort": "high"}),
        ("claude-opus-4-8", ADAPTIVE, {"effort": "high"}),
    ],
)
def test_forced_call_disables_thinking_on_older_models(write_body: Any, model: str, thinking: Any, output: Any) -> None:
    assert read_limits(write_body, model, "high", tools=[TOOL], tool_choice="required")[:2] == (thinking, output)


def make_loop(*first: Any) -> list[Any]:
    """Return two rounds of calls. The first begins with these items."""
    calls = [
        [
            {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": call_id, "output": "ok"},
        ]
        for call_id in "ab"
    ]
    return [HELLO, *first, *calls[0], *calls[1]]


def test_budget_needs_calls_that_began_with_thinking(write_body: Any) -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": json.dumps([THOUGHT])}
    chosen = [
        read_limits(write_body, "claude-sonnet-4-5", "low", *items)[0]
        for items in (make_loop(sealed), make_loop(), [*make_loop(), HELLO])
    ]
    budget = {"type": "enabled", "budget_tokens": 2048}
    assert chosen == [budget, None, None]
    answered = [*make_loop(), {"role": "assistant", "content": "Done."}, HELLO]
    assert read_limits(write_body, "claude-sonnet-4-5", "low", *answered)[0] == budget


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
def test_sampling_is_sent_only_to_models_that_accept_it(
    write_body: Any, model: str, parameters: Any, sampling: Any
) -> None:
    body = write_body(HELLO, model=model, **parameters)
    assert {name: body[name] for name in ("temperature", "top_p") if name in body} == sampling


# Tools and tool choice

TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": TOOL_SCHEMA, **more}


def test_tool_is_declared(write_body: Any) -> None:
    body = write_body(HELLO, tools=[tool(description="The weather"), {"type": "function", "name": "bare"}])
    assert body["tools"] == [
        {"name": "weather", "description": "The weather", "input_schema": TOOL_SCHEMA},
        {"name": "bare", "input_schema": {"type": "object", "properties": {}}},
    ]
    assert "tool_choice" not in body


def test_strict_tool_is_enforced_if_model_supports_it(write_body: Any) -> None:
    (new,) = write_body(HELLO, tools=[tool(strict=True)])["tools"]
    (old,) = write_body(HELLO, tools=[tool(strict=True)], model="claude-sonnet-4-0")["tools"]
    assert new == {"name": "weather", "strict": True, "input_schema": TOOL_SCHEMA | {"additionalProperties": False}}
    assert old == {"name": "weather", "input_schema": TOOL_SCHEMA}


def test_too_many_strict_tools_are_sent_as_not_strict(write_body: Any) -> None:
    body = write_body(HELLO, tools=[tool(f"t{number}", strict=True) for number in range(21)])
    assert [each.get("strict") for each in body["tools"]] == [None] * 21


def test_invalid_tool_name_gets_substitute(write_body: Any) -> None:
    long = "x" * 200
    body = write_body(
        HELLO, tools=[tool("files.read"), tool(long)], tool_choice={"type": "function", "name": "files.read"}
    )
    assert [each["name"] for each in body["tools"]] == ["files_read_601e4eb6", f"{'x' * 100}_aa20c23e"]
    assert body["tool_choice"] == {"type": "tool", "name": "files_read_601e4eb6"}


@pytest.mark.parametrize(
    ("choice", "written"),
    [
        ("auto", None),
        ("none", {"type": "none"}),
        ("required", {"type": "any"}),
        ({"type": "function", "name": "weather"}, {"type": "tool", "name": "weather"}),
    ],
)
def test_tool_choice_is_mapped(write_body: Any, choice: Any, written: Any) -> None:
    assert write_body(HELLO, tools=[tool()], tool_choice=choice).get("tool_choice") == written


@pytest.mark.parametrize(
    ("choice", "written"),
    [
        ("auto", {"type": "auto", "disable_parallel_tool_use": True}),
        ("required", {"type": "any", "disable_parallel_tool_use": True}),
        ("none", {"type": "none"}),
    ],
)
def test_parallel_tool_calls_false_is_part_of_tool_choice(write_body: Any, choice: str, written: Any) -> None:
    body = write_body(HELLO, tools=[tool()], tool_choice=choice, parallel_tool_calls=False)
    assert body["tool_choice"] == written


def test_tools_of_earlier_calls_are_declared_and_disabled(write_body: Any) -> None:
    body = write_body(HELLO, {"type": "function_call", "call_id": "1", "name": "old", "arguments": "{}"})
    assert body["tools"] == [{"name": "old", "input_schema": {"type": "object", "properties": {}}}]
    assert body["tool_choice"] == {"type": "none"}


# Prompt caching

TOOLS = [{"type": "function", "name": "a"}, {"type": "function", "name": "b"}]
SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_text", "text": text, **more}


def find_breakpoints(body: dict[str, Any]) -> dict[str, Any]:
    """Return the cache breakpoints by the text, name or call id of their block."""
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


def test_no_breakpoints_without_caching_params(write_body: Any) -> None:
    assert find_breakpoints(write_body(*CHAT, tools=TOOLS, instructions="S")) == {}


@pytest.mark.parametrize(
    ("parameters", "cache_control"),
    [
        ({"prompt_cache_key": "k"}, SHORT),
        ({"prompt_cache_retention": "in_memory"}, SHORT),
        ({"prompt_cache_options": {"ttl": "30m"}}, SHORT),
        ({"prompt_cache_retention": "24h"}, LONG),
        ({"prompt_cache_key": "k", "prompt_cache_options": {"ttl": "12h"}}, LONG),
    ],
)
def test_caching_params_set_the_usual_breakpoints(write_body: Any, parameters: Any, cache_control: Any) -> None:
    body = write_body(*CHAT, tools=TOOLS, instructions="S", **parameters)
    assert find_breakpoints(body) == {"S": cache_control, "b": cache_control, "4": cache_control, "6": cache_control}


def make_marked_message(text: str, ttl: str | None = None) -> dict[str, Any]:
    return {"role": "user", "content": [part(text, prompt_cache_breakpoint={"mode": "explicit", "ttl": ttl})]}


def test_explicit_breakpoints_take_precedence(write_body: Any) -> None:
    body = write_body(make_marked_message("1"), *CHAT[1:], tools=TOOLS, instructions="S", prompt_cache_key="k")
    assert find_breakpoints(body) == {"S": SHORT, "b": SHORT, "1": SHORT, "6": SHORT}


def test_explicit_mode_sets_only_explicit_breakpoints(write_body: Any) -> None:
    system = {**make_marked_message("S"), "role": "developer"}
    result = {"type": "function_call_output", "call_id": "c", "output": make_marked_message("out")["content"]}
    call = {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"}
    options = {"mode": "explicit"}
    body = write_body(
        system, make_marked_message("1"), call, result, tools=TOOLS, prompt_cache_key="k", prompt_cache_options=options
    )
    assert find_breakpoints(body) == {"S": SHORT, "1": SHORT, "c": SHORT}


def test_last_four_breakpoints_share_the_longest_lifetime(write_body: Any) -> None:
    body = write_body(*(make_marked_message(text, "12h" if text == "5" else None) for text in "12345"))
    assert find_breakpoints(body) == dict.fromkeys("2345", LONG)


def test_cache_breakpoint_does_not_stay_on_shared_tools(write_body: Any) -> None:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in ("f", "g")]
    plain = write_body(HELLO, tools=tools)["tools"]
    cached = write_body(HELLO, tools=tools, prompt_cache_key="k")["tools"]
    assert ["cache_control" in tool for tool in cached] == [False, True]
    assert write_body(HELLO, tools=tools)["tools"] == plain
    # Other traits of a model must not share the translation.
    assert "strict" not in write_body(HELLO, tools=tools, model="claude-3-5-haiku-latest")["tools"][0]
