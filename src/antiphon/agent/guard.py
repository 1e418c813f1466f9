"""Noticing that a model goes round in circles: the same call, with the same arguments, again and again."""

import msgspec

from antiphon.protocol.json_text import read_json
from antiphon.tools.base import Call

WARNED_AT = 2
STOPPED_AT = 3

WARNING = "This very call was made before. If the result does not help, do something else or answer with what you have."
STOPPED = "This call was not made again: it has been made twice already. Answer now, with what you have."

Signature = tuple[str, bytes]


def sign(call: Call) -> Signature:
    """Two calls are the same if their arguments are, however they are written."""
    try:
        arguments = msgspec.json.encode(read_json(call.arguments or "{}"), order="deterministic")
    except msgspec.DecodeError:
        arguments = call.arguments.encode()
    return call.name, arguments
