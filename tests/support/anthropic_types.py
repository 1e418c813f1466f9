"""Whether a request is one that the `anthropic` package's own types allow."""

import functools
import json
from typing import Any

from pydantic import ConfigDict, TypeAdapter

# Older models take these, which the package no longer has.
_RETIRED = {"temperature", "top_p"}


@functools.cache
def _adapter() -> TypeAdapter[Any]:
    # Only who checks a request has to load the package, which takes longer than to check them all.
    from anthropic.types.message_create_params import MessageCreateParamsStreaming

    return TypeAdapter(list[MessageCreateParamsStreaming], config=ConfigDict(extra="forbid"))


def check_request(raw: bytes) -> dict[str, Any]:
    """The request, read. Raises what pydantic has to say against it."""
    body: dict[str, Any] = json.loads(raw)
    _exhaust(_adapter().validate_python([{name: body[name] for name in body.keys() - _RETIRED}]))
    return body


def _exhaust(value: Any) -> None:
    """Iterables are checked only while they are read."""
    if isinstance(value, dict):
        value = value.values()
    elif value is None or isinstance(value, str | int | float):
        return
    # The package also takes back the objects of its answers, and those take anything.
    assert not hasattr(value, "model_fields"), f"not a parameter: {value}"
    for inner in value:
        _exhaust(inner)
