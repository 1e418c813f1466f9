"""JSON text from and for models, upstreams and clients."""

from typing import Any, TypeVar, overload

import msgspec

JsonObject = dict[str, Any]
T = TypeVar("T")

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of a decoder of msgspec for bytes that are not JSON, are nested too deeply, or are not of its type."""


@overload
def read_json(text: str | bytes) -> Any: ...
@overload
def read_json(text: str | bytes, kind: type[T]) -> T: ...
@overload
def read_json(text: str | bytes, kind: Any) -> Any: ...
def read_json(text: str | bytes, kind: Any = Any) -> Any:
    """Decode JSON text as `kind`. Raise msgspec.DecodeError, or its subclass ValidationError, for all `JSON_ERRORS`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error.reason}") from None


def to_text(value: object) -> str:
    """Return a text unchanged, and other data as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
