"""A request as a cassette knows it: what the model is asked, without what differs from one run to the next."""

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

JsonObject = dict[str, Any]

# What changes nothing of the answer.
_UNSAID = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "stream", "stream_options", "user"}
)
_SECRETS = frozenset({"authorization", "api_key", "api-key", "x-api-key", "proxy-authorization", "cookie"})
_BLOTTED = "***"
_MOST_LINES = 80


def render(request: JsonObject, origins: Mapping[str, str]) -> JsonObject:
    """The request in a form that is the same in every run.

    Ids of items and calls are numbered as they come; the id of a response becomes the key of the request that it
    answered, which `origins` tells.
    """
    rendered = {name: value for name, value in request.items() if name not in _UNSAID}
    previous = rendered.get("previous_response_id")
    if isinstance(previous, str):
        rendered["previous_response_id"] = f"the response to {origins[previous]}" if previous in origins else previous
    if isinstance(rendered.get("input"), list):
        numbers: dict[str, str] = {}
        rendered["input"] = [_rename(item, numbers) for item in rendered["input"]]
    hidden: JsonObject = hide_secrets(rendered)
    return hidden


def _rename(item: Any, numbers: dict[str, str]) -> Any:
    if not isinstance(item, dict):
        return item
    renamed = dict(item)
    for name in ("id", "call_id", "approval_request_id"):
        if isinstance(item.get(name), str):
            renamed[name] = numbers.setdefault(item[name], f"id {len(numbers) + 1}")
    return renamed


def hide_secrets(value: Any) -> Any:
    """The value with everything blotted out that stands where secrets do, as in the tools of type `mcp`."""
    if isinstance(value, list):
        return [hide_secrets(each) for each in value]
    if not isinstance(value, dict):
        return value
    hidden = {
        name: _BLOTTED if name.lower() in _SECRETS and isinstance(each, str) else hide_secrets(each)
        for name, each in value.items()
    }
    if value.get("type") == "mcp" and isinstance(value.get("headers"), dict):
        hidden["headers"] = dict.fromkeys(value["headers"], _BLOTTED)
    return hidden


def make_key(rendered: JsonObject) -> str:
    canonical = json.dumps(rendered, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def find_nearest(rendered: JsonObject, recorded: Sequence[JsonObject]) -> JsonObject | None:
    """The recorded request that has most lines in common with this one."""
    asked = _lines(rendered)
    return max(
        recorded,
        key=lambda each: difflib.SequenceMatcher(None, _lines(each), asked, autojunk=False).ratio(),
        default=None,
    )


def show_difference(recorded: JsonObject, asked: JsonObject) -> str:
    diff = difflib.unified_diff(_lines(recorded), _lines(asked), "recorded", "asked", n=2, lineterm="")
    lines = list(diff)
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} lines more"]
    return "\n".join(lines)


def _lines(rendered: JsonObject) -> list[str]:
    return json.dumps(rendered, sort_keys=True, indent=2, ensure_ascii=False).splitlines()
