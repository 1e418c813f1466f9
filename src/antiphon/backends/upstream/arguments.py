"""The arguments of past calls, for servers that read them."""

from typing import Any

import msgspec

_OBJECT = msgspec.json.Decoder(dict[str, Any])


def write_arguments(arguments: str) -> str:
    """The arguments as the model wrote them. What is no JSON object is told as text in one.

    Many servers read what was once called for, and would refuse the whole conversation for one slip of their model.
    """
    try:
        _OBJECT.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.json.encode({"arguments": arguments}).decode() if arguments.strip() else "{}"
    return arguments
