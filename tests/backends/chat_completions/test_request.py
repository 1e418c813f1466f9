"""Request bodies without the messages, checked against the types of the official SDK."""

from typing import Any

import pytest

from antiphon.backends.chat_completions.quirks import Quirks, find_quirks
from antiphon.backends.chat_completions.request import list_ignored_params, make_body
from support.chat_messages import make_turn, write

LOOK_UP = {"type": "function", "name": "look_up", "parameters": {"type": "object"}, "strict": False}


# Parameters


def test_unset_parameters_are_not_sent() -> None:
    assert write() == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_set_parameters_are_sent() -> None:
    body = write(
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        max_output_tokens=7,
        top_logprobs=2,
        tools=[LOOK_UP],
        parallel_tool_calls=False,
        metadata={"a": "b"},
        store=True,
    )
    assert {name: body[name] for name in body.keys() - {"messages", "model", "stream", "stream_options", "tools"}} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "max_tokens": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "parallel_tool_calls": False,
    }


def test_include_requests_logprobs() -> None:
    body = write(include=["message.output_text.logprobs"])
    assert (body["logprobs"], body["top_logprobs"]) == (True, 0)


def test_token_limit_field_and_stream_options_follow_quirks() -> None:
    body = write(max_output_tokens=7, quirks=Quirks(max_tokens_field="max_completion_tokens", stream_usage=False))
    assert body["max_completion_tokens"] == 7
    assert not {"max_tokens", "stream_options"} & body.keys()


def test_hints_are_sent_only_to_supporting_servers() -> None:
    hints = {
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in-memory",
        "safety_identifier": "s",
        "service_tier": "flex",
        "user": "u",
        "text": {"verbosity": "low"},
    }
    openai = find_quirks("gpt-4o", "https://api.openai.com/v1")
    sent = write(quirks=openai, **hints)
    assert {name: sent[name] for name in openai.hints} == {
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory",
        "safety_identifier": "s",
        "service_tier": "flex",
        "user": "u",
        "verbosity": "low",
    }
    assert write(**hints) == write()


@pytest.mark.parametrize(
    ("quirks", "expected"),
    [
        (Quirks(), {}),
        (Quirks(reasoning_effort="reasoning_effort"), {"reasoning_effort": "xhigh"}),
        (Quirks(reasoning_effort="reasoning_effort", effort_words={"xhigh": "high"}), {"reasoning_effort": "high"}),
    ],
)
def test_effort_is_sent_in_the_supported_field(quirks: Quirks, expected: dict[str, Any]) -> None:
    body = write(quirks=quirks, reasoning={"effort": "xhigh", "summary": "auto"})
    assert {name: body[name] for name in body if name.startswith("reasoning")} == expected


def test_effort_may_be_nested_in_an_object() -> None:
    turn = make_turn(reasoning={"effort": "low"})
    assert make_body(turn, Quirks(reasoning_effort="reasoning.effort"))["reasoning"] == {"effort": "low"}


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": "d"},
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}, "description": "d", "strict": True},
            },
        ),
        (
            {"type": "json_schema", "name": "n", "schema": {}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        ),
    ],
)
def test_text_format_is_translated(requested: dict[str, Any], expected: Any) -> None:
    assert write(text={"format": requested}).get("response_format") == expected


# Tools


def test_tool_is_sent_with_its_fields() -> None:
    full = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    bare = {"type": "function", "name": "g", "parameters": None, "strict": None}
    assert write(tools=[full, bare])["tools"] == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
        },
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    ]


@pytest.mark.parametrize(
    ("choice", "names", "sent"),
    [
        (None, ["look_up", "other"], None),
        ("auto", ["look_up", "other"], None),
        ("none", None, None),
        ("required", ["look_up", "other"], "required"),
        (
            {"type": "function", "name": "other"},
            ["look_up", "other"],
            {"type": "function", "function": {"name": "other"}},
        ),
    ],
)
def test_s3_11_tool_choice_is_translated(choice: Any, names: list[str] | None, sent: Any) -> None:
    body = write(tools=[LOOK_UP, LOOK_UP | {"name": "other"}], tool_choice=choice)
    tools = body.get("tools")
    assert (None if tools is None else [each["function"]["name"] for each in tools], body.get("tool_choice")) == (
        names,
        sent,
    )


def test_named_choice_sends_only_that_tool_if_unsupported() -> None:
    chosen = {"type": "function", "name": "other"}
    body = write(tools=[LOOK_UP, LOOK_UP | {"name": "other"}], tool_choice=chosen, quirks=Quirks(named_choice=False))
    assert ([tool["function"]["name"] for tool in body["tools"]], body["tool_choice"]) == (["other"], "required")


def test_parallel_tool_calls_needs_tools() -> None:
    assert "parallel_tool_calls" not in write(parallel_tool_calls=True)


WISHES: dict[str, Any] = {
    "client_metadata": {"session": "s"},
    "reasoning": {"effort": "high", "summary": "auto"},
    "service_tier": "flex",
    "text": {"verbosity": "low"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "user": "u",
}


@pytest.mark.parametrize(
    ("model", "server", "ignored"),
    [
        ("m", None, ["client_metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
                     "safety_identifier", "service_tier", "user", "text.verbosity", "reasoning.effort"]),
        ("gpt-oss-20b", "groq", ["client_metadata", "prompt_cache_key", "prompt_cache_options",
                                 "prompt_cache_retention", "safety_identifier", "text.verbosity"]),
        ("gpt-5", "openai", ["client_metadata", "prompt_cache_options"]),
    ],
)  # fmt: skip
def test_ignored_parameters_are_listed(model: str, server: str | None, ignored: list[str]) -> None:
    quirks = find_quirks(model, "http://127.0.0.1/v1", server=server)
    assert list_ignored_params(make_turn(**WISHES).request, quirks) == ignored


@pytest.mark.parametrize("requested", [{}, {"service_tier": "auto"}, {"service_tier": "default"}, {"reasoning": {}}])
def test_default_values_are_not_listed_as_ignored(requested: dict[str, Any]) -> None:
    assert list_ignored_params(make_turn(**requested).request, Quirks()) == []


def test_shared_tools_are_written_for_each_choice() -> None:
    tools = [LOOK_UP, LOOK_UP | {"name": "find"}]
    chosen = {"tools": tools, "tool_choice": {"type": "function", "name": "find"}}
    assert [tool["function"]["name"] for tool in write(tools=tools)["tools"]] == ["look_up", "find"]
    assert [tool["function"]["name"] for tool in write(quirks=Quirks(named_choice=False), **chosen)["tools"]] == [
        "find"
    ]
    assert "tools" not in write(tools=tools, tool_choice="none")
    assert len(write(**chosen)["tools"]) == 2
