"""How many tokens a turn took, about, where the server does not say. Meant to be too high rather than too low."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage

BYTES_PER_TOKEN = 3.5
TOKENS_PER_ITEM = 4

_FLAT = {"input_image": 1600, "computer_screenshot": 1600, "input_file": 5000}
# What no model reads: sealed content is opened first, and ids and kinds are for programs.
_UNREAD = frozenset({"encrypted_content", "id", "call_id", "type", "status"})


def estimate_usage(request: JsonObject, read: Iterable[JsonObject], said: Iterable[JsonObject]) -> Usage:
    """From the lengths of what was sent and received. `read` is the whole conversation, whoever has kept it."""
    asked = TOKENS_PER_ITEM + _weigh(request.get("instructions")) + sum(map(_weigh_item, read))
    # A schema is read as JSON, with all of its names and marks.
    asked += sum(_weigh_bytes(msgspec.json.encode(request[name])) for name in ("tools", "text") if request.get(name))
    answered = sum(map(_weigh_item, said))
    counts = math.ceil(asked), math.ceil(answered)
    return Usage(*counts, sum(counts), estimated=True)


def _weigh_item(item: JsonObject) -> float:
    return TOKENS_PER_ITEM + _weigh(item)


def _weigh(value: Any) -> float:
    if isinstance(value, str):
        return _weigh_bytes(value.encode(errors="replace"))
    if isinstance(value, list):
        return sum(map(_weigh, value))
    if isinstance(value, dict):
        flat = _FLAT.get(str(value.get("type")))
        if flat is not None:
            return flat
        return sum(_weigh(inner) for name, inner in value.items() if name not in _UNREAD)
    return 0 if value is None else 1


def _weigh_bytes(text: bytes) -> float:
    return len(text) / BYTES_PER_TOKEN
