"""Prepare JSON schemas for llguidance, which constrains the model's output to them."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from antiphon.errors import InvalidRequest

JsonSchema = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_UNSUPPORTED = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
_MAX_DEPTH = 64
# Longer lists block the compiler for seconds. A lower limit still matches the schema.
_MAX_ITEMS = 1000
# Fixed whitespace: a small model would write spaces without end. `oneOf` is read as `anyOf`, because the compiler can
# rarely prove that the alternatives exclude each other.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


def translate_schema(schema: JsonSchema, path: str) -> JsonSchema:
    """Return the schema for the grammar compiler. Raises InvalidRequest if a grammar cannot express it."""
    translated = _Translator(closed=not _has_all_of(schema, 0)).translate(schema, path, 0)
    _check_finite(translated, path)
    return {**translated, "x-guidance": _STYLE} if isinstance(translated, dict) else translated


def _has_all_of(schema: Any, depth: int) -> bool:
    # The parts of an `allOf` add properties to each other, and references can connect any schemas.
    if depth > 2 * _MAX_DEPTH or not isinstance(schema, dict | list):
        return False
    inner = schema.values() if isinstance(schema, dict) else schema
    return "allOf" in schema or any(_has_all_of(each, depth + 1) for each in inner)


class _Translator:
    """Translates a schema. With `closed`, objects get only named properties: a small model would invent more."""

    def __init__(self, *, closed: bool) -> None:
        self._closed = closed

    def translate(self, schema: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise InvalidRequest("The schema is nested too deeply.", param=path)
        if not isinstance(schema, dict):
            return schema
        translated = {key: self._translate_value(key, value, f"{path}.{key}", depth) for key, value in schema.items()}
        translated.pop("x-guidance", None)
        if not translated.get("uniqueItems", True):
            del translated["uniqueItems"]
        # In JSON Schema, an unknown format is only an annotation.
        if translated.get("format") not in _FORMATS:
            translated.pop("format", None)
        if isinstance(most := translated.get("maxItems"), int):
            translated["maxItems"] = min(most, max(_MAX_ITEMS, translated.get("minItems", 0)))
        self._check_keywords(translated, path)
        if self._closed and _can_be_closed(translated):
            translated["additionalProperties"] = False
        return translated

    def _translate_value(self, key: str, value: Any, path: str, depth: int) -> Any:
        if key in _MAPS and isinstance(value, dict):
            return {name: self.translate(each, f"{path}.{name}", depth + 1) for name, each in value.items()}
        if key in (*_LISTS, "items") and isinstance(value, list):
            return [self.translate(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(value)]
        return self.translate(value, path, depth + 1) if key in _SINGLES else value

    def _check_keywords(self, schema: JsonSchema, path: str) -> None:
        for keyword in sorted(_UNSUPPORTED.intersection(schema)):
            raise InvalidRequest(
                f"The embedded model cannot enforce a schema with '{keyword}'.",
                param=f"{path}.{keyword}",
                code="unsupported_schema",
            )


def _can_be_closed(schema: JsonSchema) -> bool:
    properties = schema.get("properties")
    return (
        isinstance(properties, dict)
        and "additionalProperties" not in schema
        and "patternProperties" not in schema
        and set(schema.get("required") or ()) <= set(properties)
    )


def _check_finite(schema: Any, path: str) -> None:
    """Reject references that always lead back to themselves: no finite value matches them.

    The compiler accepts such a schema, and stops enforcing it when it cannot continue.
    """
    unproven = dict.fromkeys(_find_references(schema))
    for _ in range(_MAX_DEPTH):
        known = len(unproven)
        for reference in tuple(unproven):
            if _is_finite(_follow(schema, reference), unproven):
                del unproven[reference]
        if len(unproven) == known:
            break
    for reference in unproven:
        raise InvalidRequest(
            f"No finite value matches this schema: '{reference}' always contains itself.",
            param=path,
            code="unsupported_schema",
        )


def _find_references(schema: Any) -> Iterator[str]:
    pending = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            if isinstance(each.get("$ref"), str):
                yield each["$ref"]
            pending += each.values()
        elif isinstance(each, list):
            pending += each


def _follow(schema: Any, reference: str) -> Any:
    """Return the schema that a reference names. A broken one gives True: the compiler reports it better."""
    try:
        for step in reference.removeprefix("#").split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            schema = schema[int(name)] if isinstance(schema, list) else schema[name]
    except (LookupError, TypeError, ValueError):
        return True
    return schema


def _is_finite(schema: Any, unproven: dict[str, None], depth: int = 0) -> bool:
    """Return True if a matching value can be finite, given the references that are not known to be.

    An invalid schema counts as finite: the compiler rejects it.
    """
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return True
    if isinstance(reference := schema.get("$ref"), str) and reference in unproven:
        return False
    alternatives = [_get_list(schema.get(key)) for key in ("anyOf", "oneOf")]
    required = _get_list(schema.get("allOf"))
    kinds = schema.get("type")
    if kinds in ("object", ["object"]):
        properties = schema.get("properties")
        required += [properties.get(name) for name in _get_list(schema.get("required")) if isinstance(properties, dict)]
    elif kinds in ("array", ["array"]):
        required += _list_required_items(schema)
    return all(_is_finite(each, unproven, depth + 1) for each in required) and all(
        any(_is_finite(each, unproven, depth + 1) for each in schemas) for schemas in alternatives if schemas
    )


def _list_required_items(schema: JsonSchema) -> list[Any]:
    minimum = schema.get("minItems")
    if not isinstance(minimum, int) or minimum < 1:
        return []
    first = _get_list(schema.get("prefixItems"))[:minimum]
    return [*first, schema.get("items")] if minimum > len(first) else first


def _get_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []
