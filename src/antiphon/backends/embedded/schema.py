"""JSON Schemas, made ready for llguidance, which turns them into constraints on what the model may say."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from antiphon.errors import InvalidRequest

JsonSchema = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_INEXPRESSIBLE = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
_DEEPEST = 64
# Longer lists take the compiler seconds, in which nobody is served. A tighter limit is still within the schema.
_MOST_ITEMS = 1000
# One way to write each value: a small model left free to choose its spaces never stops writing them. `oneOf` is read as
# `anyOf`, because hardly any real one can be proven exclusive.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


def fit_schema(schema: JsonSchema, place: str) -> JsonSchema:
    """The schema as the grammar compiler takes it. Raises, naming the place, on what a grammar cannot express."""
    fitted = _Fitter(closed=not _mentions_all_of(schema, 0)).fit(schema, place, 0)
    _refuse_endless(fitted, place)
    return {**fitted, "x-guidance": _STYLE} if isinstance(fitted, dict) else fitted


def _mentions_all_of(schema: Any, depth: int) -> bool:
    # Parts of an `allOf` add to each other's properties, and a reference may lead from one to anywhere.
    if depth > 2 * _DEEPEST or not isinstance(schema, dict | list):
        return False
    inner = schema.values() if isinstance(schema, dict) else schema
    return "allOf" in schema or any(_mentions_all_of(each, depth + 1) for each in inner)


class _Fitter:
    """Walks a schema. `closed` objects get no properties beyond those named: a small model would make up some."""

    def __init__(self, *, closed: bool) -> None:
        self._closed = closed

    def fit(self, schema: Any, place: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise InvalidRequest("The schema is nested too deeply.", param=place)
        if not isinstance(schema, dict):
            return schema
        fitted = {key: self._fit_value(key, value, f"{place}.{key}", depth) for key, value in schema.items()}
        fitted.pop("x-guidance", None)
        if not fitted.get("uniqueItems", True):
            del fitted["uniqueItems"]
        # The formats that are not known are remarks, says JSON Schema.
        if fitted.get("format") not in _FORMATS:
            fitted.pop("format", None)
        if isinstance(most := fitted.get("maxItems"), int):
            fitted["maxItems"] = min(most, max(_MOST_ITEMS, fitted.get("minItems", 0)))
        self._refuse(fitted, place)
        if self._closed and _can_close(fitted):
            fitted["additionalProperties"] = False
        return fitted

    def _fit_value(self, key: str, value: Any, place: str, depth: int) -> Any:
        if key in _MAPS and isinstance(value, dict):
            return {name: self.fit(each, f"{place}.{name}", depth + 1) for name, each in value.items()}
        if key in (*_LISTS, "items") and isinstance(value, list):
            return [self.fit(each, f"{place}[{index}]", depth + 1) for index, each in enumerate(value)]
        return self.fit(value, place, depth + 1) if key in _SINGLES else value

    def _refuse(self, schema: JsonSchema, place: str) -> None:
        for keyword in sorted(_INEXPRESSIBLE.intersection(schema)):
            raise InvalidRequest(
                f"The embedded model cannot be held to a schema with '{keyword}'.",
                param=f"{place}.{keyword}",
                code="unsupported_schema",
            )


def _can_close(schema: JsonSchema) -> bool:
    properties = schema.get("properties")
    return (
        isinstance(properties, dict)
        and "additionalProperties" not in schema
        and "patternProperties" not in schema
        and set(schema.get("required") or ()) <= set(properties)
    )


def _refuse_endless(schema: Any, place: str) -> None:
    """Refuse references that lead back to themselves by every way: no value that has an end fits them.

    The compiler takes such a schema, and lets go of the model where it finds no way on.
    """
    open_ends = dict.fromkeys(_find_references(schema))
    for _ in range(_DEEPEST):
        known = len(open_ends)
        for reference in tuple(open_ends):
            if _ends(_follow(schema, reference), open_ends):
                del open_ends[reference]
        if len(open_ends) == known:
            break
    for reference in open_ends:
        raise InvalidRequest(
            f"No value fits this schema: one for '{reference}' would have to hold another, without end.",
            param=place,
            code="unsupported_schema",
        )


def _find_references(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if isinstance(each.get("$ref"), str):
                yield each["$ref"]
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _follow(schema: Any, reference: str) -> Any:
    """What a reference leads to; True, which anything fits, if it leads nowhere: the compiler says so better."""
    try:
        for step in reference.removeprefix("#").split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            schema = schema[int(name)] if isinstance(schema, list) else schema[name]
    except (LookupError, TypeError, ValueError):
        return True
    return schema


def _ends(schema: Any, open_ends: dict[str, None], depth: int = 0) -> bool:
    """Whether a value that fits can come to an end, as far as is known of the references.

    A schema that makes no sense is none of our concern here: the compiler refuses it.
    """
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return True
    if isinstance(reference := schema.get("$ref"), str) and reference in open_ends:
        return False
    ways = [_list(schema.get(key)) for key in ("anyOf", "oneOf")]
    needs = _list(schema.get("allOf"))
    kinds = schema.get("type")
    if kinds in ("object", ["object"]):
        properties = schema.get("properties")
        needs += [properties.get(name) for name in _list(schema.get("required")) if isinstance(properties, dict)]
    elif kinds in ("array", ["array"]):
        needs += _needed_items(schema)
    return all(_ends(each, open_ends, depth + 1) for each in needs) and all(
        any(_ends(each, open_ends, depth + 1) for each in way) for way in ways if way
    )


def _needed_items(schema: JsonSchema) -> list[Any]:
    fewest = schema.get("minItems")
    if not isinstance(fewest, int) or fewest < 1:
        return []
    first = _list(schema.get("prefixItems"))[:fewest]
    return [*first, schema.get("items")] if fewest > len(first) else first


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []
