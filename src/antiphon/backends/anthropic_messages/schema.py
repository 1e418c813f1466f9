"""Restrict JSON schemas to the keywords that the Messages API can enforce."""

import json
from collections.abc import Mapping
from typing import Any

JsonSchema = dict[str, Any]

_SUPPORTED = {"type", "description", "title", "enum", "const", "required", "default", "$ref", "pattern"}
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"}
_DEFINITIONS = {"$defs", "definitions"}
# Keywords to drop. `additionalProperties` is set anew.
_DROPPED = {"additionalProperties", "$schema", "$id", "examples"}


class _NotClosable(Exception):
    """The schema allows unnamed properties or refers to itself. The API takes closed objects only."""


def restrict_schema(schema: Mapping[str, Any]) -> JsonSchema | None:
    """Return the schema with closed objects. Unsupported keywords move into the descriptions.

    Return None for a schema that allows properties it does not name, or that is recursive: closing it would forbid
    valid values.
    """
    try:
        _check_recursion(schema, schema, ())
        return _restrict(schema)
    except _NotClosable:
        return None


def _check_recursion(schema: Any, root: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Follow all references of the schema. Raise if one leads back to itself."""
    if isinstance(schema, list):
        for inner in schema:
            _check_recursion(inner, root, path)
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference == "#" or reference in path:
            raise _NotClosable
        _, _, pointer = reference.partition("#/")
        target: Any = root
        for step in pointer.split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        _check_recursion(target, root, (*path, reference))
    for name, inner in schema.items():
        if name not in _DEFINITIONS:
            _check_recursion(inner, root, path)


def _restrict(schema: Any) -> JsonSchema:
    if not isinstance(schema, Mapping):
        raise _NotClosable  # `true` allows any value
    restricted: JsonSchema = {}
    unsupported: JsonSchema = {}
    for key, value in schema.items():
        if key in _SUPPORTED or (key == "format" and value in _FORMATS) or (key == "minItems" and value in (0, 1)):
            restricted[key] = value
        elif key == "properties" or key in _DEFINITIONS:
            restricted[key] = {name: _restrict(inner) for name, inner in value.items()}
        elif key in {"anyOf", "oneOf", "allOf"}:
            restricted["allOf" if key == "allOf" else "anyOf"] = [_restrict(inner) for inner in value]
        elif key == "items":
            restricted[key] = _restrict(value)
        elif key not in _DROPPED:
            unsupported[key] = value
    _close_object(schema, restricted)
    if unsupported:
        note = json.dumps(unsupported, ensure_ascii=False)
        restricted["description"] = "\n\n".join(filter(None, [restricted.get("description"), note]))
    return restricted


def _close_object(schema: Mapping[str, Any], restricted: JsonSchema) -> None:
    kind = restricted.get("type")
    if kind == "object" or (isinstance(kind, list) and "object" in kind) or "properties" in restricted:
        if schema.get("additionalProperties") not in (None, False) or "patternProperties" in schema:
            raise _NotClosable
        if not restricted.get("properties") and "additionalProperties" not in schema:
            raise _NotClosable
        restricted["additionalProperties"] = False
