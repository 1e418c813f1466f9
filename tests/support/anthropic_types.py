"""Validation of request bodies with the types of the `anthropic` package."""

import functools
import json
from typing import Any

from pydantic import ConfigDict, TypeAdapter

# Fields of older models that the package has removed.
_RETIRED = {"temperature", "top_p"}


@functools.cache
def _adapter() -> TypeAdapter[Any]:
    # Imported on first use: loading the package takes longer than validating all requests.
    from anthropic.types.message_create_params import MessageCreateParams

    return TypeAdapter(list[MessageCreateParams], config=ConfigDict(extra="forbid"))


def check_request(raw: bytes) -> dict[str, Any]:
    """Decode a request body. Raises pydantic's ValidationError if the types do not allow it."""
    body: dict[str, Any] = json.loads(raw)
    _exhaust(_adapter().validate_python([{name: body[name] for name in body.keys() - _RETIRED}]))
    return body


def _exhaust(value: Any) -> None:
    """Read a value to its end: pydantic validates iterables lazily."""
    if isinstance(value, dict):
        value = value.values()
    elif value is None or isinstance(value, str | int | float):
        return
    # The types also allow response objects, which accept any field.
    assert not hasattr(value, "model_fields"), f"not a parameter: {value}"
    for inner in value:
        _exhaust(inner)
