"""Differences between servers and models, from the rules in quirks.toml."""

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

Server = Literal[
    "vllm", "sglang", "llama.cpp", "ollama", "lmstudio", "openai", "openrouter", "groq", "mistral", "deepseek", "gemini"
]
Hint = Literal["prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user", "verbosity"]


class Quirks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requirements of one model on one server. The defaults suit most servers, and none rejects them."""

    system_role: Literal["system", "developer", "user"] = "system"
    """The role of instructions, and of system and developer messages."""
    merge_system: bool = True
    """Put all system and developer messages into one at the beginning."""
    alternate: bool = False
    """Merge consecutive user messages."""
    separate_outputs: bool = False
    """Insert an assistant message between tool outputs and a user message."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The field for the maximum number of output tokens."""
    reasoning_effort: Literal["omit", "reasoning_effort", "reasoning.effort"] = "omit"
    """The field for the reasoning effort. `omit` sends none."""
    effort_words: dict[str, str] = {}
    """The server's values for some efforts."""
    replay_reasoning: Literal["never", "loop", "calls", "always"] = "never"
    """The earlier assistant messages that are sent with their reasoning.

    `calls`: those with calls and those that follow their outputs. `loop`: those of the unfinished loop of calls.
    `always`: all.
    """
    empty_reasoning: str = ""
    """With `replay_reasoning` set to `calls`: the reasoning of messages that have none."""
    reasoning_field: Literal["reasoning_content", "reasoning", "reasoning_details"] = "reasoning_content"
    """The field for that reasoning."""
    thinking_tags: bool = True
    """Extract reasoning from a leading `<think>`."""
    thinking_open: bool = False
    """The answer starts inside of `<think>`."""
    call_ids: Literal["any", "short", "nine"] = "any"
    """The form of call ids: `any`, `short` (at most 40 characters), or `nine` letters and digits."""
    named_choice: bool = True
    """The server accepts the name of a tool in `tool_choice`. Otherwise a required tool is the only one sent."""
    keep_call_extras: bool = False
    """Send the `extra_content` of a call back with it."""
    placeholder_signature: str = ""
    """The signature of earlier calls that have none."""
    tool_images: bool = False
    """Tool messages can contain images."""
    file_ids: bool = False
    """The server accepts files by `file_id`."""
    file_urls: bool = False
    """The server accepts files by `file_url`."""
    json_schema: bool = True
    """The server enforces schemas."""
    stream_usage: bool = True
    """Request the usage of a stream with `stream_options`."""
    always_stream: bool = False
    """Never call the server without streaming."""
    hints: list[Hint] = []
    """The hint fields that the server supports."""


class _Rule(msgspec.Struct, frozen=True):
    changes: dict[str, Any]
    model: Sequence[str]
    host: Sequence[str]
    server: str | None

    def matches(self, model: str, host: str, server: str | None) -> bool:
        if self.model and not _matches(model, self.model):
            return False
        if self.server is None and not self.host:
            return True
        return self.server == server if server is not None else _matches(host, self.host)


@functools.cache
def _load_rules() -> list[_Rule]:
    text = Path(__file__).with_name("quirks.toml").read_bytes()
    tables: list[dict[str, Any]] = msgspec.toml.decode(text)["rule"]
    return [
        _Rule(model=table.pop("model", ()), host=table.pop("host", ()), server=table.pop("server", None), changes=table)
        for table in tables
    ]


def find_quirks(
    model: str,
    base_url: str,
    *,
    server: str | None = None,
    changes: Mapping[str, Any] | None = None,
    model_changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Quirks:
    """Return the quirks of a model: the built-in rules, then `changes`, then `model_changes` by name pattern."""
    model = model.lower()
    host = urlsplit(base_url).netloc.rpartition("@")[2].lower()
    found: dict[str, Any] = {}
    for rule in _load_rules():
        if rule.matches(model, host, server):
            found |= rule.changes
    found |= changes or {}
    for pattern, more in (model_changes or {}).items():
        if _matches(model, [pattern.lower()]):
            found |= more
    return msgspec.convert(found, Quirks)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
