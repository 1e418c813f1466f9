"""Deltas as JSON: the finished steps of a background response are stored as their deltas."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import msgspec
from msgspec import Raw

from antiphon.protocol import codec
from antiphon.protocol.content import ANNOTATIONS
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.passthrough import decode_output_item

EncodedDelta = tuple[str, dict[str, Raw]]
"""The name of a delta's type, and its fields that differ from their defaults."""

_TYPES: dict[str, type[Delta]] = {kind.__name__: kind for kind in get_args(Delta)}
_ITEM_FIELDS: dict[str, Callable[[Raw], Any]] = {
    "item": lambda raw: decode_output_item(bytes(raw)),
    "event": lambda raw: Unknown(bytes(raw)),
    "annotation": ANNOTATIONS.decode_lossless,
}


def encode_deltas(batch: Iterable[Delta]) -> list[EncodedDelta]:
    """Encode deltas. Adjacent text without log probabilities is joined."""
    return [(type(delta).__name__, _encode_fields(delta)) for delta in join_text(batch)]


def join_text(batch: Iterable[Delta]) -> list[Delta]:
    """Return the deltas with adjacent text of one kind joined."""
    joined: list[Delta] = []
    pieces: list[str] = []
    kind: type[deltas.Text] | type[deltas.Reasoning] = deltas.Text
    for delta in batch:
        is_text = isinstance(delta, deltas.Text | deltas.Reasoning) and not getattr(delta, "logprobs", ())
        if pieces and (not is_text or type(delta) is not kind):
            joined.append(kind("".join(pieces)))
            pieces = []
        if is_text:
            assert isinstance(delta, deltas.Text | deltas.Reasoning)
            kind = type(delta)
            pieces.append(delta.text)
        else:
            joined.append(delta)
    if pieces:
        joined.append(kind("".join(pieces)))
    return joined


def decode_deltas(encoded: Sequence[EncodedDelta]) -> list[Delta]:
    """Decode deltas. Raises ValueError for a type or a field that this version does not have."""
    return [_decode(name, fields) for name, fields in encoded]


def _encode_fields(delta: Delta) -> dict[str, Raw]:
    fields = msgspec.structs.fields(delta)
    values = {field.name: getattr(delta, field.name) for field in fields}
    return {
        field.name: Raw(codec.encode(values[field.name])) for field in fields if values[field.name] != field.default
    }


def _decode(name: str, fields: dict[str, Raw]) -> Delta:
    kind = _TYPES.get(name)
    if kind is None:
        raise ValueError(f"unknown type of delta {name!r}")
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for field, raw in fields.items():
        if field not in types:
            raise ValueError(f"{name} has no field {field!r}")
        special = _ITEM_FIELDS.get(field)
        values[field] = special(raw) if special is not None else msgspec.json.decode(raw, type=types[field])
    delta: Delta = kind(**values)
    return delta
