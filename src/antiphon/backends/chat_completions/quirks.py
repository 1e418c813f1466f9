"""How servers and models differ from one another: data in quirks.toml, read here."""

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

Server = Literal[
    "vllm", "sglang", "llama.cpp", "ollama", "lmstudio", "openai", "openrouter", "groq", "mistral", "deepseek", "gemini"
]
Hint = Literal["prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user", "verbosity"]


class Quirks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one model on one server wants. The defaults are what most take, and none refuses.

    `merge_system` puts all system and developer messages into one at the beginning, and `alternate` makes one message
    of what the user says in a row. `replay_reasoning` says which of the model's earlier messages go back with the
    reasoning that led to them: those with `calls` (which then always have some, if only an empty text), those of the
    `loop` of calls that is not finished yet, `always` all, or `never` one; `reasoning_field` is where it stands in
    them. `reasoning_effort` names the field for the effort, `omit` leaves it out, and `effort_words` are other words
    for some efforts. `thinking_tags` looks for
    `<think>` at the beginning of answers; with `thinking_open`, answers begin as if it stood there. `call_ids` are of
    `any` form, `short` (at most 40 characters) or `nine` letters and digits. Without `named_choice`, a tool that must
    be called is the only one that is shown. `hints` are the fields for hints which the
    server knows. With `keep_call_extras`, what a call brings along in `extra_content` is sent back with it.
    """

    system_role: Literal["system", "developer", "user"] = "system"
    merge_system: bool = True
    alternate: bool = False
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    reasoning_effort: Literal["omit", "reasoning_effort", "reasoning.effort"] = "omit"
    effort_words: dict[str, str] = {}
    replay_reasoning: Literal["never", "loop", "calls", "always"] = "never"
    reasoning_field: Literal["reasoning_content", "reasoning", "reasoning_details"] = "reasoning_content"
    thinking_tags: bool = True
    thinking_open: bool = False
    call_ids: Literal["any", "short", "nine"] = "any"
    named_choice: bool = True
    keep_call_extras: bool = False
    tool_images: bool = False
    file_ids: bool = False
    file_urls: bool = False
    json_schema: bool = True
    stream_usage: bool = True
    hints: list[Hint] = []


class _Rule(msgspec.Struct, frozen=True):
    changes: dict[str, Any]
    model: Sequence[str]
    host: Sequence[str]
    server: str | None

    def fits(self, model: str, host: str, server: str | None) -> bool:
        if self.model and not _matches(model, self.model):
            return False
        if self.server is None and not self.host:
            return True
        return self.server == server if server is not None else _matches(host, self.host)


@functools.cache
def _load() -> list[_Rule]:
    text = resources.files(__package__).joinpath("quirks.toml").read_bytes()
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
    """What is known of this model at this address, with the changes of the settings: for all models, and by pattern."""
    model = model.lower()
    host = urlsplit(base_url).netloc.rpartition("@")[2].lower()
    found: dict[str, Any] = {}
    for rule in _load():
        if rule.fits(model, host, server):
            found |= rule.changes
    found |= changes or {}
    for pattern, more in (model_changes or {}).items():
        if _matches(model, [pattern.lower()]):
            found |= more
    return msgspec.convert(found, Quirks)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
