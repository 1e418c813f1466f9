"""Lookup of model traits by name."""

import pytest

from antiphon.backends.anthropic_messages.traits import find_traits


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("claude-opus-4-20250514", "claude-opus-4-0"),
        ("claude-3-7-sonnet-latest", "claude-sonnet-3-7"),
        ("anthropic/claude-sonnet-4.5", "claude-sonnet-4-5"),
        ("us.anthropic.claude-opus-4-7-v1:0", "claude-opus-4-7"),
        ("claude-haiku-4-5@20251001", "claude-haiku-4-5"),
        ("Claude-Opus-5", "claude-opus-5"),
        ("claude-sonnet-9", "claude-sonnet-5-5"),
        ("claude-mythos-preview", "claude-mythos-5"),
    ],
)
def test_traits_depend_on_line_and_version(name: str, like: str) -> None:
    assert find_traits(name) == find_traits(like)


@pytest.mark.parametrize(
    ("name", "thinking", "off", "sampling", "json_schema"),
    [
        ("claude-2.1", "none", "omit", True, False),
        ("claude-3-haiku-20240307", "none", "omit", True, False),
        ("claude-opus-4-1", "budget", "omit", True, False),
        ("claude-sonnet-4-5", "budget", "omit", True, True),
        ("claude-opus-4-6", "adaptive", "omit", True, True),
        ("claude-opus-4-8", "adaptive", "omit", False, True),
        ("claude-opus-5", "adaptive", "disabled", False, True),
        ("claude-fable-5", "adaptive", "never", False, True),
        ("claude-fable-5-2", "adaptive", "never", False, True),
        ("claude-haiku-5-5", "adaptive", "disabled", False, True),
        ("claude-opus-5-5", "adaptive", "never", False, True),
        ("claude-unheard-of", "adaptive", "never", False, True),
        ("deepseek-chat", "budget", "omit", True, False),
    ],
)
def test_generations_have_expected_traits(
    name: str, thinking: str, off: str, sampling: bool, json_schema: bool
) -> None:
    traits = find_traits(name)
    assert (traits.thinking, traits.thinking_off, traits.takes_sampling, traits.json_schema) == (
        thinking,
        off,
        sampling,
        json_schema,
    )
