"""Validate responses and events against the Open Responses schema.

The OpenAPI document is not part of the project. It is read from the directory `shared` beside the repository. Without
it every check passes, and a note is written to stderr.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

from jsonschema.exceptions import best_match

from support.schema_validator import SchemaValidator

DOCUMENT = Path(__file__).parents[3] / "shared" / "protocol" / "openresponses-openapi.json"


class NotOpenResponses(AssertionError):
    """An object does not match the Open Responses schema."""


def available() -> bool:
    return DOCUMENT.is_file()


def validate_response(obj: dict[str, Any]) -> None:
    """Raise NotOpenResponses if this is not a response object of Open Responses."""
    if _schemas():
        _check("ResponseResource", obj)


def validate_event(obj: dict[str, Any]) -> None:
    """Raise NotOpenResponses if this is not a stream event of Open Responses."""
    if _schemas():
        kind = obj.get("type")
        if kind not in event_schemas():
            raise NotOpenResponses(f"no event has the type {kind!r}")
        _check(event_schemas()[kind], obj)


def validate_compaction(obj: dict[str, Any]) -> None:
    """Raise NotOpenResponses if this is not a compaction result of Open Responses."""
    if _schemas():
        _check("CompactResource", obj)


def validate_socket_error(obj: dict[str, Any]) -> None:
    """Raise NotOpenResponses if this is not a WebSocket error of Open Responses."""
    if _schemas():
        _check("WebSocketErrorEvent", obj)


@functools.cache
def event_schemas() -> dict[str | None, str]:
    """Return the schema name of each stream event, by event type."""
    schemas = _schemas()
    names = (name for name in schemas if name.endswith("StreamingEvent"))
    return {_tag(schemas, name): name for name in names}


def forget() -> None:
    """Clear the caches, so that the document is read again."""
    for cached in (event_schemas, _validator, _schemas):
        cached.cache_clear()


def _check(schema: str, obj: dict[str, Any]) -> None:
    error = best_match(_validator(schema).iter_errors(obj))
    if error is not None:
        raise NotOpenResponses(f"{schema}: {error.json_path}: {error.message}")


@functools.cache
def _validator(schema: str) -> SchemaValidator:
    return SchemaValidator({"$ref": f"#/$defs/{schema}", "$defs": _schemas()})


@functools.cache
def _schemas() -> dict[str, Any]:
    if not available():
        sys.stderr.write(f"{DOCUMENT.name} not found: nothing is checked against Open Responses\n")
        return {}
    components = json.loads(DOCUMENT.read_text(encoding="utf-8"))["components"]["schemas"]
    schemas: dict[str, Any] = _rewrite(components, components)
    return schemas


def _rewrite(node: Any, components: dict[str, Any]) -> Any:
    """Convert OpenAPI to plain JSON Schema: local references, and unions that are selected by `type`.

    A `oneOf` would try every member, and its error would only state that none or several match.
    """
    if isinstance(node, list):
        return [_rewrite(element, components) for element in node]
    if not isinstance(node, dict):
        return node
    if "oneOf" in node and "discriminator" in node:
        tags = {_tag(components, member["$ref"].rpartition("/")[2]): member for member in node["oneOf"]}
        if None not in tags and len(tags) == len(node["oneOf"]):
            return _choose_by_type({tag: _rewrite(member, components) for tag, member in tags.items()})
    rewritten = {key: _rewrite(value, components) for key, value in node.items()}
    if isinstance(rewritten.get("$ref"), str):
        rewritten["$ref"] = rewritten["$ref"].replace("#/components/schemas/", "#/$defs/")
    return rewritten


def _choose_by_type(members: dict[str | None, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": list(members)}},
        "allOf": [{"if": {"properties": {"type": {"const": tag}}}, "then": member} for tag, member in members.items()],
    }


def _tag(components: dict[str, Any], name: str) -> str | None:
    tags = components[name]["properties"]["type"].get("enum", ())
    return tags[0] if len(tags) == 1 else None
