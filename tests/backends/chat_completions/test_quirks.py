"""Quirks by model, host and settings."""

from typing import Any

import pytest

from antiphon.backends.chat_completions.backend import ChatCompletionsOptions, check_quirks
from antiphon.backends.chat_completions.quirks import Quirks, find_quirks
from antiphon.errors import ConfigError

ANYWHERE = "http://127.0.0.1:8000/v1"


def differences(model: str, url: str = ANYWHERE, **options: Any) -> dict[str, Any]:
    found = find_quirks(model, url, **options)
    return {
        name: value for name in Quirks.__struct_fields__ if (value := getattr(found, name)) != getattr(Quirks(), name)
    }


def test_unknown_model_has_default_quirks() -> None:
    assert differences("llama-3") == {}


@pytest.mark.parametrize(
    ("model", "url", "expected"),
    [
        ("m", "http://127.0.0.1:11434/v1", {"reasoning_field": "reasoning", "named_choice": False}),
        ("m", "http://localhost:1234/v1", {"named_choice": False}),
        ("m", "https://api.deepseek.com", {"json_schema": False, "replay_reasoning": "calls"}),
        ("m", "https://api.mistral.ai/v1", {"call_ids": "nine", "stream_usage": False, "separate_outputs": True}),
        ("mistralai/Devstral-Small-2507", ANYWHERE, {"separate_outputs": True}),
        ("m", "https://generativelanguage.googleapis.com/v1beta/openai", {"keep_call_extras": True}),
        ("deepseek-ai/DeepSeek-R1", ANYWHERE, {}),
        (
            "deepseek-ai/DeepSeek-V3.2",
            ANYWHERE,
            {"replay_reasoning": "calls", "reasoning_effort": "reasoning_effort"},
        ),
        ("google/gemma-2-9b-it", ANYWHERE, {"system_role": "user", "alternate": True}),
    ],
)
def test_quirks_depend_on_model_and_host(model: str, url: str, expected: dict[str, Any]) -> None:
    assert differences(model, url) == expected


def test_openai_reasoning_model_has_developer_role() -> None:
    found = [find_quirks(model, "https://api.openai.com/v1").system_role for model in ("gpt-4o", "o3-mini", "gpt-5.1")]
    assert found == ["system", "developer", "developer"]


def test_configured_server_selects_quirks() -> None:
    fields = [find_quirks("gpt-oss-20b", ANYWHERE, server=server).reasoning_field for server in (None, "llama.cpp")]
    assert fields == ["reasoning", "reasoning_content"]


def test_configured_server_overrides_host() -> None:
    assert differences("m", "https://api.mistral.ai/v1", server="sglang") == {}


def test_configured_quirks_override_rules_then_patterns() -> None:
    options = ChatCompletionsOptions(
        base_url="https://api.mistral.ai/v1",
        quirks={"call_ids": "any", "stream_usage": True, "separate_outputs": False},
        model_quirks={"Magistral-*": {"thinking_open": True, "call_ids": "short"}},
    )
    assert options.find_quirks("mistral-small") == Quirks()
    assert options.find_quirks("magistral-medium") == Quirks(thinking_open=True, call_ids="short")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quirks": {"replay": 1}}, "backends.up.quirks: Object contains unknown field replay"),
        ({"quirks": {"hints": ["x"]}}, "backends.up.quirks.hints[0]: Invalid enum value 'x'"),
        (
            {"model_quirks": {"a*": {"call_ids": 9}}},
            "backends.up.model_quirks.'a*'.call_ids: Expected str, got int",
        ),
    ],
)
def test_unknown_quirk_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_quirks(ChatCompletionsOptions(base_url=ANYWHERE, **options), name="up")
    assert caught.value.message == message
