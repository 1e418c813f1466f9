import pytest

from antiphon.agent.execute.builder import UsageRegistry, build_usage_block
from antiphon.errors import ConfigError


def test_s1_20_the_block_has_these_delimiters_and_trimmed_texts() -> None:
    registry = UsageRegistry()
    registry.register("look_up", "\n  Use it first. \n")
    registry.register("send", "Use it last.")
    assert registry.build_block() == (
        "<<<APTIX_SERVER_TOOL_USAGE_METADATA_BEGIN>>>\n"
        "<<<APTIX_TOOL_USAGE_BEGIN name='look_up'>>>\n"
        "Use it first.\n"
        "<<<APTIX_TOOL_USAGE_END name='look_up'>>>\n"
        "\n"
        "<<<APTIX_TOOL_USAGE_BEGIN name='send'>>>\n"
        "Use it last.\n"
        "<<<APTIX_TOOL_USAGE_END name='send'>>>\n"
        "\n"
        "<<<APTIX_SERVER_TOOL_USAGE_METADATA_END>>>"
    )


@pytest.mark.parametrize(
    ("name", "usage", "reason"),
    [
        ("send", None, "The tool 'send' has no usage text."),
        ("send", " \n", "The tool 'send' has no usage text."),
        ("look_up", "Again.", "There are two tools named 'look_up'."),
        ("it's", "Use.", 'Invalid tool name "it\'s".'),
        ("", "Use.", "Invalid tool name ''."),
    ],
)
def test_a_tool_that_cannot_be_told_about_is_refused(name: str, usage: str | None, reason: str) -> None:
    registry = UsageRegistry()
    registry.register("look_up", "Use it.")
    with pytest.raises(ConfigError) as caught:
        registry.register(name, usage)
    assert caught.value.message == reason


def test_a_tool_without_a_text_is_left_out_of_the_block_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert build_usage_block({"look_up": "", "send": None}) is None
    block = build_usage_block({"look_up": "", "send": "Use it."})
    assert block is not None
    assert "look_up" not in block
    told = "the tool {} has no usage text and is not in the system prompt"
    assert caplog.messages == [told.format(name) for name in ("look_up", "send", "look_up")]


def test_no_tools_are_no_block() -> None:
    assert UsageRegistry().build_block() is None
