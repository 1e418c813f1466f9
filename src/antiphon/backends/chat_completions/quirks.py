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
    """The requirements of one model on one server. The defaults suit most servers, and none rejects them.

    `merge_system` puts all system and developer messages into one at the beginning. `alternate` merges consecutive user
    messages. `separate_outputs` inserts an assistant message between tool outputs and a user message.
    `replay_reasoning` selects the earlier assistant messages that are sent with their reasoning: those with
    `calls` and those that follow their outputs, those of the unfinished `loop` of calls, `always` all, or `never` any.
    `reasoning_field` is the field for it. With `calls`, messages without reasoning have `empty_reasoning` instead.
    `reasoning_effort` is the field for the effort (`omit`: none),
    and `effort_words` are the server's values for some efforts. `thinking_tags` extracts reasoning from a leading
    `<think>`; with `thinking_open`, the answer starts inside it. `call_ids` may have `any` form, `short` (at most 40
    characters) or `nine` letters and digits. Without `named_choice`, a tool that must be called is the only one sent.
    `hints` are the hint fields that the server supports. With `keep_call_extras`, a call's `extra_content` is sent back
    with it. `placeholder_signature` is sent with earlier calls that have no signature. With `always_stream`, the server
    is never called without streaming.
    """

    system_role: Literal["system", "developer", "user"] = "system"
    merge_system: bool = True
    alternate: bool = False
    separate_outputs: bool = False
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    reasoning_effort: Literal["omit", "reasoning_effort", "reasoning.effort"] = "omit"
    effort_words: dict[str, str] = {}
    replay_reasoning: Literal["never", "loop", "calls", "always"] = "never"
    empty_reasoning: str = ""
    reasoning_field: Literal["reasoning_content", "reasoning", "reasoning_details"] = "reasoning_content"
    thinking_tags: bool = True
    thinking_open: bool = False
    call_ids: Literal["any", "short", "nine"] = "any"
    named_choice: bool = True
    keep_call_extras: bool = False
    placeholder_signature: str = ""
    tool_images: bool = False
    file_ids: bool = False
    file_urls: bool = False
    json_schema: bool = True
    stream_usage: bool = True
    always_stream: bool = False
    hints: list[Hint] = []


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
