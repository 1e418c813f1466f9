"""Noticing that a model goes round in circles: the same call, with the same arguments, again and again."""

from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.tools.base import Call

WARNED_AT = 2
STOPPED_AT = 3

WARNING = "This very call was made before. If the result does not help, do something else or answer with what you have."
STOPPED = "This call was not made again: it has been made twice already. Answer now, with what you have."


def count_repeats(call: Call, made: Sequence[Call]) -> int:
    """How often this call has been made, this time included."""
    signature = _sign(call)
    return 1 + sum(_sign(each) == signature for each in made)


def _sign(call: Call) -> tuple[str, Any]:
    """Two calls are the same if their arguments are, however they are written."""
    try:
        arguments = msgspec.json.encode(msgspec.json.decode(call.arguments or "{}"), order="deterministic")
    except msgspec.DecodeError:
        arguments = call.arguments.encode()
    return call.name, arguments
