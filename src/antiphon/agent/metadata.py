"""How tools say when and how they are to be used: one block of text for the system prompt, with a part for each."""

import logging
from collections.abc import Mapping

from antiphon.errors import ConfigError

logger = logging.getLogger(__name__)

BEGIN = "<<<APTIX_SERVER_TOOL_USAGE_METADATA_BEGIN>>>"
END = "<<<APTIX_SERVER_TOOL_USAGE_METADATA_END>>>"


class UsageRegistry:
    """Tools by name, each with the text that says how it is used. One without is refused: models misuse such tools."""

    def __init__(self) -> None:
        self._usages: dict[str, str] = {}

    def register(self, name: str, usage: str | None) -> None:
        if not name or "'" in name or "\n" in name:
            raise ConfigError(f"A tool cannot be called {name!r}.")
        if usage is None or not usage.strip():
            raise ConfigError(f"The tool '{name}' has no usage text.")
        if name in self._usages:
            raise ConfigError(f"There are two tools called '{name}'.")
        self._usages[name] = usage

    def build_block(self) -> str | None:
        return build_usage_block(self._usages)


def build_usage_block(usages: Mapping[str, str | None]) -> str | None:
    """The block for these tools, in their order; None if none has a text. Those without are left out."""
    parts: list[str] = []
    for name, usage in usages.items():
        text = (usage or "").strip()
        if not text:
            logger.warning("the tool %s has no usage text and is not in the system prompt", name)
            continue
        parts += [f"<<<APTIX_TOOL_USAGE_BEGIN name='{name}'>>>", text, f"<<<APTIX_TOOL_USAGE_END name='{name}'>>>", ""]
    return "\n".join([BEGIN, *parts, END]) if parts else None
