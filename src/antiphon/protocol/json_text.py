"""JSON text from and for models, upstreams and clients."""

from typing import Any

import msgspec

JsonObject = dict[str, Any]


def read_json(text: str | bytes, kind: Any = Any) -> Any:
    """Decode JSON text as `kind`.

    Raises msgspec.DecodeError or its subclass ValidationError, also for input that msgspec reports with other errors:
    deep nesting and broken characters.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error.reason}") from None


def to_text(value: object) -> str:
    """Return a text unchanged, and other data as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
