"""JSON schemas in the part of the language that this API can hold a model to."""

import json
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_KEPT = {"type", "description", "title", "enum", "const", "required", "default", "$ref", "pattern"}
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"}
_DEFINITIONS = {"$defs", "definitions"}
_MEANINGLESS = {"additionalProperties", "$schema", "$id", "examples"}


class _Open(Exception):
    """The schema leaves names open, or has no end, and the API takes closed objects only."""


def fit(schema: Mapping[str, Any]) -> Schema | None:
    """The schema with closed objects, and with what cannot be enforced said in its descriptions.

    None if it allows for properties that it does not name, or contains itself: closing it would forbid what it is for.
    """
    try:
        _follow(schema, schema, ())
        return _fit(schema)
    except _Open:
        return None


def _follow(schema: Any, root: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Walk the schema through its references, and see whether it comes back to where it was."""
    if isinstance(schema, list):
        for inner in schema:
            _follow(inner, root, path)
    if not isinstance(schema, Mapping):
        return
    target = schema.get("$ref")
    if isinstance(target, str):
        if target == "#" or target in path:
            raise _Open
        _, _, place = target.partition("#/")
        found: Any = root
        for step in place.split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        _follow(found, root, (*path, target))
    for name, inner in schema.items():
        if name not in _DEFINITIONS:
            _follow(inner, root, path)


def _fit(schema: Any) -> Schema:
    if not isinstance(schema, Mapping):
        raise _Open  # true or {}: anything
    fitted: Schema = {}
    said: Schema = {}
    for key, value in schema.items():
        if key in _KEPT or (key == "format" and value in _FORMATS) or (key == "minItems" and value in (0, 1)):
            fitted[key] = value
        elif key == "properties" or key in _DEFINITIONS:
            fitted[key] = {name: _fit(inner) for name, inner in value.items()}
        elif key in {"anyOf", "oneOf", "allOf"}:
            fitted["allOf" if key == "allOf" else "anyOf"] = [_fit(inner) for inner in value]
        elif key == "items":
            fitted[key] = _fit(value)
        elif key not in _MEANINGLESS:
            said[key] = value
    _close(schema, fitted)
    if said:
        limits = json.dumps(said, ensure_ascii=False)
        fitted["description"] = "\n\n".join(filter(None, [fitted.get("description"), limits]))
    return fitted


def _close(schema: Mapping[str, Any], fitted: Schema) -> None:
    kind = fitted.get("type")
    if kind == "object" or (isinstance(kind, list) and "object" in kind) or "properties" in fitted:
        if schema.get("additionalProperties") not in (None, False) or "patternProperties" in schema:
            raise _Open
        if not fitted.get("properties") and "additionalProperties" not in schema:
            raise _Open
        fitted["additionalProperties"] = False
