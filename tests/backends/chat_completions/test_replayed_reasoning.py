"""Reasoning and signatures of earlier turns in Chat Completions messages."""

import json
from typing import Any

import pytest

from antiphon.backends.chat_completions.quirks import Quirks, find_quirks
from antiphon.backends.chat_completions.request import make_body
from support.chat_messages import (
    PLAIN,
    assistant,
    call,
    chat_call,
    make_turn,
    output,
    say,
    think,
)

REASONED = [
    say("user", "one"),
    think("First."),
    call("call_a"),
    output("call_a"),
    think("Then."),
    say("assistant", "two"),
    say("user", "three"),
    think("Again."),
    call("call_b"),
    output("call_b"),
]


@pytest.mark.parametrize(
    ("rule", "replayed"),
    [
        ("never", [None, None, None]),
        ("loop", [None, None, "Again."]),
        ("calls", ["First.", "Then.", "Again."]),
        ("always", ["First.", "Then.", "Again."]),
    ],
)
def test_reasoning_is_replayed_by_rule(rule: Any, replayed: list[str | None]) -> None:
    body = make_body(make_turn(REASONED), Quirks(replay_reasoning=rule, reasoning_field="reasoning"))
    assistant_messages = [message for message in body["messages"] if message["role"] == "assistant"]
    assert [message.get("reasoning") for message in assistant_messages] == replayed


def test_call_without_reasoning_gets_an_empty_field() -> None:
    body = make_body(make_turn([call("call_a"), output("call_a")]), Quirks(replay_reasoning="calls"))
    assert body["messages"][0] == assistant(None, chat_call("call_a"), reasoning_content="")


def test_empty_reasoning_follows_only_outputs_of_the_same_user_message() -> None:
    history = [
        *(say("user", "a"), say("assistant", "b"), say("user", "c"), call("call_a"), output("call_a")),
        *(say("developer", "d"), say("assistant", "e"), say("user", "f"), say("assistant", "g")),
    ]
    messages = make_body(make_turn(history), Quirks(replay_reasoning="calls"))["messages"]
    sent = [message.get("reasoning_content") for message in messages if message["role"] == "assistant"]
    assert sent == [None, "", "", None]


def test_reasoning_alone_is_sent_only_if_replayed() -> None:
    turn = make_turn([think("Hm.")])
    assert make_body(turn, PLAIN)["messages"] == []
    assert make_body(turn, Quirks(replay_reasoning="always"))["messages"] == [assistant("", reasoning_content="Hm.")]


def test_summary_replaces_hidden_reasoning() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Sum."}]}
    body = make_body(make_turn([item, say("assistant", "two")]), Quirks(replay_reasoning="always"))
    assert body["messages"] == [assistant("two", reasoning_content="Sum.")]


def test_reasoning_details_are_returned_unchanged() -> None:
    details = [{"type": "reasoning.encrypted", "data": "ZZZ", "index": 0}]
    sealed = json.dumps({"of": "chat_completions", "details": details})
    item = think("Hm.") | {"encrypted_content": sealed}
    quirks = find_quirks("anthropic/claude", "https://openrouter.ai/api/v1")
    body = make_body(make_turn([item, call("call_a"), output("call_a")]), quirks)
    assert body["messages"][0] == assistant(None, chat_call("call_a"), reasoning_details=details)
    body = make_body(make_turn([think("Hm."), call("call_a"), output("call_a")]), quirks)
    words = [{"type": "reasoning.text", "text": "Hm."}]
    assert body["messages"][0] == assistant(None, chat_call("call_a"), reasoning_details=words)


def test_call_extra_content_is_returned() -> None:
    extra = {"google": {"thought_signature": "c2ln"}}
    sealed = json.dumps({"of": "chat_completions", "calls": {"call_a": extra}})
    items = [{"type": "reasoning", "summary": [], "encrypted_content": sealed}, call("call_a"), output("call_a")]
    gemini = find_quirks("gemini-3-pro", "https://generativelanguage.googleapis.com/v1beta/openai")
    sent = make_body(make_turn(items), gemini)["messages"][0]["tool_calls"]
    assert sent == [chat_call("call_a") | {"extra_content": extra}]
    assert make_body(make_turn(items), PLAIN)["messages"][0]["tool_calls"] == [chat_call("call_a")]


@pytest.mark.parametrize(
    ("model", "signature"),
    [("gemini-3-pro", "skip_thought_signature_validator"), ("gemini-2.5-pro", None)],
)
def test_unsigned_calls_get_the_placeholder_of_gemini(model: str, signature: str | None) -> None:
    """earendil-works/pi#1829"""
    gemini = find_quirks(model, "https://generativelanguage.googleapis.com/v1beta/openai")
    parallel = [call("call_a"), call("call_b"), output("call_a"), output("call_b")]
    messages = make_body(make_turn([*parallel, call("call_c"), output("call_c")]), gemini)["messages"]
    extra = {"extra_content": {"google": {"thought_signature": signature}}} if signature else {}
    assert [message["tool_calls"] for message in messages if message["role"] == "assistant"] == [
        [chat_call("call_a") | extra, chat_call("call_b")],
        [chat_call("call_c") | extra],
    ]


@pytest.mark.parametrize(
    ("model", "url", "empty"),
    [("deepseek-v4-pro", "https://api.deepseek.com", ""), ("kimi-k2.6", "https://api.moonshot.ai/v1", " ")],
)
def test_messages_of_a_turn_with_calls_have_reasoning(model: str, url: str, empty: str) -> None:
    """MoonshotAI/kimi-cli#2141, charmbracelet/crush#2696"""
    items = [
        say("user", "a"),
        say("assistant", "Plain."),
        say("user", "b"),
        think("Hm."),
        call("call_a"),
        output("call_a"),
        say("assistant", "Done."),
        say("user", "c"),
        call("call_b"),
        output("call_b"),
    ]
    messages = make_body(make_turn(items), find_quirks(model, url))["messages"]
    assert [message.get("reasoning_content") for message in messages if message["role"] == "assistant"] == [
        None,
        "Hm.",
        empty,
        empty,
    ]


def test_opaque_state_of_another_backend_is_ignored() -> None:
    item = think("Hm.") | {"encrypted_content": "gAAAA"}
    body = make_body(make_turn([item, say("assistant", "two")]), Quirks(replay_reasoning="always"))
    assert body["messages"] == [assistant("two", reasoning_content="Hm.")]
