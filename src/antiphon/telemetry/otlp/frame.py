"""Frames: the parts that many spans have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.telemetry.otlp.attributes import Attributes


class SpanFrame:
    """The name and the attributes that many spans have in common, and the types of their other attributes.

    A span has a tuple with the values of the other attributes. A value of None is left out. `kind` is the number of
    the SpanKind. A frame is used with one tracer. `encoded` belongs to the protobuf encoder.
    """

    __slots__ = ("_remote", "attributes", "encoded", "has_remote_parent", "kind", "name", "types")

    def __init__(
        self,
        name: str,
        kind: int,
        attributes: Attributes,
        types: Mapping[str, type],
        *,
        has_remote_parent: bool = False,
    ) -> None:
        assert attributes.keys().isdisjoint(types), "an attribute has two values"
        self.name = name
        self.kind = kind
        self.attributes = attributes
        self.types = types
        self.has_remote_parent = has_remote_parent
        self.encoded = b""
        self._remote: SpanFrame | None = None

    def get_remote(self) -> "SpanFrame":
        """Return the same frame for spans whose parent belongs to another process."""
        if self._remote is None:
            self._remote = SpanFrame(self.name, self.kind, self.attributes, self.types, has_remote_parent=True)
        return self._remote

    def merge_values(self, values: Sequence[Any]) -> Attributes:
        """Return all attributes of a span with these values."""
        named = zip(self.types, values, strict=True)
        return self.attributes | {name: value for name, value in named if value is not None}
