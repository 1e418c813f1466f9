"""The field `tool_usage` of a response: web searches, and tokens of generated images."""

from typing import Any

from antiphon.protocol.json_text import JsonObject
from antiphon.stream import deltas

_DETAILS = ("image_tokens", "text_tokens")


def make_tool_usage() -> JsonObject:
    """Return the usage of a response that has not used the tools. OpenAI sends zeros, too."""
    return {
        "image_gen": {
            "input_tokens": 0,
            "input_tokens_details": dict.fromkeys(_DETAILS, 0),
            "output_tokens": 0,
            "output_tokens_details": dict.fromkeys(_DETAILS, 0),
            "total_tokens": 0,
        },
        "web_search": {"num_requests": 0},
    }


def add_tool_usage(current: JsonObject | None, added: deltas.ToolUsage) -> JsonObject:
    """Return the sum of two usages. Numbers that an endpoint has not reported count as zero."""
    usage = make_tool_usage() if current is None else current
    images = usage["image_gen"]
    return {
        "image_gen": _add(images, added.images) if added.images is not None else images,
        "web_search": {"num_requests": usage["web_search"]["num_requests"] + added.searches},
    }


def _add(total: JsonObject, added: Any) -> JsonObject:
    given = added if isinstance(added, dict) else {}
    return {
        name: _add(value, given.get(name)) if isinstance(value, dict) else value + _read_count(given.get(name))
        for name, value in total.items()
    }


def _read_count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
