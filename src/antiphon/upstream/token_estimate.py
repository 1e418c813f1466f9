"""How many tokens a turn has, about, for servers that cannot count them. Meant to be too high rather than too low."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.protocol import codec
from antiphon.protocol.items import Item
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown

ASCII_CHARACTERS_PER_TOKEN = 3.5
# Letters of Greek or Cyrillic have two bytes; those of Chinese, Japanese or Korean three, which makes each a token.
OTHER_BYTES_PER_TOKEN = 3
TOKENS_PER_ITEM = 4
TOKENS_PER_IMAGE = 1600
TOKENS_PER_FILE = 5000

_FLAT = {"input_image": TOKENS_PER_IMAGE, "computer_screenshot": TOKENS_PER_IMAGE, "input_file": TOKENS_PER_FILE}
# What is not read by the model: sealed content is opened first, ids and kinds are for programs.
_UNREAD = frozenset({"encrypted_content", "id", "type", "status", "object", "logprobs"})


def estimate_tokens(request: CreateRequest, items: Sequence[Item | Unknown]) -> int:
    """From the texts' lengths, with a flat amount for every item, image and file."""
    total = float(TOKENS_PER_ITEM)
    total += _weigh_text(request.instructions) if isinstance(request.instructions, str) else 0
    total += sum(TOKENS_PER_ITEM + _weigh(_decode(item)) for item in items)
    # A schema is read as JSON, with all of its names and marks.
    for part in (request.tools, request.text):
        if part:
            total += _weigh_text(codec.encode(part).decode())
    return math.ceil(total)


def _decode(item: Any) -> Any:
    return msgspec.json.decode(codec.encode(item))


def _weigh(value: Any) -> float:
    if isinstance(value, str):
        return _weigh_text(value)
    if isinstance(value, list):
        return sum(map(_weigh, value))
    if isinstance(value, dict):
        flat = _FLAT.get(value.get("type", ""))
        if flat is not None:
            return flat
        return sum(_weigh(inner) for name, inner in value.items() if name not in _UNREAD)
    return 0 if value is None else 1


def _weigh_text(text: str) -> float:
    plain = len(text) if text.isascii() else len(text.encode("ascii", "ignore"))
    others = 0 if plain == len(text) else len(text.encode("utf-8", "surrogatepass")) - plain
    return plain / ASCII_CHARACTERS_PER_TOKEN + others / OTHER_BYTES_PER_TOKEN
