"""Attributes of spans, events and links, with the limits of the OTEL_* variables."""

from collections.abc import Mapping, Sequence
from typing import Any

Attributes = dict[str, Any]

INT64 = range(-(1 << 63), 1 << 63)
"""The numbers that OTLP can represent."""


def add_attributes(
    attributes: Attributes, new: Mapping[str, Any], max_count: int | None, max_length: int | None
) -> int:
    """Add attributes. Return the number of dropped ones: the oldest, if there are too many."""
    dropped = 0
    for name, value in new.items():
        if name in attributes:  # it becomes the newest
            del attributes[name]
        elif max_count is not None and len(attributes) >= max_count:
            dropped += 1
            if not attributes:  # none is allowed
                continue
            del attributes[next(iter(attributes))]
        attributes[name] = value if max_length is None else clean_value(value, max_length)
    return dropped


def clean_value(value: Any, max_length: int | None = None) -> Any:
    """Return a value that OTLP can represent. Longer strings are cut to `max_length` characters."""
    if isinstance(value, str):
        return value if max_length is None else value[:max_length]
    if value is None or isinstance(value, bool | int | float | bytes):
        return value
    if isinstance(value, Sequence):
        return tuple(clean_value(each, max_length) for each in value)
    if isinstance(value, Mapping):
        return {str(name): clean_value(each, max_length) for name, each in value.items() if name}
    return clean_value(str(value), max_length)
