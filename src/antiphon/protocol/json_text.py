"""JSON that somebody else has written, a model most of all."""

from typing import Any

import msgspec


def read_json(text: str | bytes, kind: Any = Any) -> Any:
    """What a JSON text says, as something of this type. Raises msgspec.DecodeError, or its kin msgspec.ValidationError.

    msgspec itself has other errors for what is nested too deeply, and for half a character.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error.reason}") from None
