"""Token estimates for servers that do not count. They err on the high side."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from antiphon.protocol import codec
from antiphon.protocol.items import Item
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown

ASCII_CHARACTERS_PER_TOKEN = 3.5
# Greek and Cyrillic letters have two bytes. Chinese, Japanese and Korean ones have three, and are a token each.
OTHER_BYTES_PER_TOKEN = 3
TOKENS_PER_ITEM = 4
TOKENS_PER_IMAGE = 1600
TOKENS_PER_FILE = 5000

_FLAT = {"input_image": TOKENS_PER_IMAGE, "computer_screenshot": TOKENS_PER_IMAGE, "input_file": TOKENS_PER_FILE}
# Fields that the model does not read. Encrypted content is decrypted before it is counted.
_UNREAD = frozenset({"encrypted_content", "id", "call_id", "type", "status", "object", "logprobs"})
# Schemas are read as JSON, with all names and punctuation.
_SCHEMAS = ("tools", "text")


def estimate_tokens(request: CreateRequest, items: Sequence[Item | Unknown]) -> int:
    """Estimate the input tokens of a turn from text lengths, with a flat amount per item, image and file."""
    fields = {name: getattr(request, name) for name in ("instructions", *_SCHEMAS)}
    return estimate_payload_tokens(fields, (msgspec.json.decode(codec.encode(item)) for item in items))


def estimate_payload_tokens(request: JsonObject, items: Iterable[JsonObject]) -> int:
    """Estimate the input tokens of a turn whose items are decoded JSON."""
    instructions = request.get("instructions")
    total = float(TOKENS_PER_ITEM)
    total += _estimate_text(instructions) if isinstance(instructions, str) else 0
    total += sum(map(estimate_item, items))
    total += sum(_estimate_text(codec.encode(request[name]).decode()) for name in _SCHEMAS if request.get(name))
    return math.ceil(total)


def estimate_item(item: JsonObject) -> float:
    """Estimate the tokens of one item."""
    return TOKENS_PER_ITEM + _estimate_value(item)


def _estimate_value(value: Any) -> float:
    if isinstance(value, str):
        return _estimate_text(value)
    if isinstance(value, list):
        return sum(map(_estimate_value, value))
    if isinstance(value, dict):
        flat = _FLAT.get(str(value.get("type", "")))
        if flat is not None:
            return flat
        return sum(_estimate_value(inner) for name, inner in value.items() if name not in _UNREAD)
    return 0 if value is None else 1


def _estimate_text(text: str) -> float:
    ascii_length = len(text) if text.isascii() else len(text.encode("ascii", "ignore"))
    other_bytes = 0 if ascii_length == len(text) else len(text.encode("utf-8", "surrogatepass")) - ascii_length
    return ascii_length / ASCII_CHARACTERS_PER_TOKEN + other_bytes / OTHER_BYTES_PER_TOKEN
