"""Prepare JSON schemas for llguidance, which constrains the model's output to them."""

import re
from collections import deque
from collections.abc import Iterable
from typing import Any

from antiphon.config.settings import GrammarLimits
from antiphon.errors import InvalidRequest
from antiphon.grammars.references import Pointer, References
from antiphon.grammars.schema_check import ParamPath, SchemaCheck, get_count_limit, join_path, read_count

JsonSchema = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems")
# The compiler enforces these, and does not need the others.
_ENFORCED = {
    *_LISTS, *_SINGLES, "properties", "patternProperties", "$ref", "const", "enum", "type", "required", "format",
    "pattern", "minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
_UNSUPPORTED = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
# Longer lists block the compiler for seconds. A lower limit still matches the schema.
_MAX_ITEMS = 1000
# References can repeat large parts. The compiler reads at most this multiple of the limit on a schema's size.
_MAX_GROWTH = 2
_NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]+")
# Fixed whitespace: a small model would write spaces endlessly. `oneOf` is read as `anyOf`, because the compiler can
# rarely prove that the alternatives exclude each other.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


def translate_schema(
    schema: JsonSchema, path: str, *, limits: GrammarLimits | None = None, check: SchemaCheck | None = None
) -> JsonSchema:
    """Return the schema for the grammar compiler. Raises InvalidRequest if a grammar cannot express it.

    `check` is shared by all schemas of one request.
    """
    limits = limits or GrammarLimits()
    (check or SchemaCheck(limits)).check(schema, path)
    translator = _Translator(schema, limits, closed=not _has_all_of(schema))
    translated, definitions = translator.translate_all(path)
    if definitions:
        _check_finite(definitions, translator.references, path)
        translated = {**translated, "$defs": definitions}
        _check_size(translated, limits, path)
    return {**translated, "x-guidance": _STYLE}


def _has_all_of(schema: Any) -> bool:
    # The parts of an `allOf` add properties to each other, and references can connect any schemas.
    pending = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            if "allOf" in each:
                return True
            pending += each.values()
        elif isinstance(each, list):
            pending += each
    return False


class _Translator:
    """Translates a schema. With `closed`, objects get only named properties: a small model would invent more.

    Each part that a reference names becomes one entry of `$defs`, however the references are spelt. `references` has
    the first spelling of each by the name in `$defs`.
    """

    def __init__(self, root: JsonSchema, limits: GrammarLimits, *, closed: bool) -> None:
        self.references: dict[str, str] = {}
        self._root = root
        self._limits = limits
        self._closed = closed
        self._targets = References(root)
        self._names: dict[Pointer, str] = {}
        self._pending: deque[Pointer] = deque()
        # The values have the original too, so that its id stays in use.
        self._translated: dict[int, tuple[Any, Any]] = {}

    def translate_all(self, param: str) -> tuple[JsonSchema, JsonSchema]:
        """Return the translated schema and its definitions."""
        root: ParamPath = (None, param)
        translated = self.translate(self._root, root)
        definitions: JsonSchema = {}
        while self._pending:
            pointer = self._pending.popleft()
            path = (root, "".join(f".{step}" for step in pointer))
            definitions[self._names[pointer]] = self.translate(self._targets.find(pointer), path)
        return translated, definitions

    def translate(self, schema: Any, path: ParamPath) -> Any:
        if not isinstance(schema, dict):
            return schema
        if id(schema) not in self._translated:
            self._translated[id(schema)] = schema, self._translate_keywords(schema, path)
        return self._translated[id(schema)][1]

    def _translate_keywords(self, schema: JsonSchema, path: ParamPath) -> JsonSchema:
        # All parts are translated, since an error must not depend on the use of a part.
        parts = {key: self._translate_value(key, value, (path, f".{key}")) for key, value in schema.items()}
        if not parts.get("uniqueItems", True):
            del parts["uniqueItems"]
        for keyword in sorted(_UNSUPPORTED.intersection(parts)):
            raise InvalidRequest(
                f"The embedded model cannot enforce a schema with '{keyword}'.",
                param=join_path((path, f".{keyword}")),
                code="unsupported_schema",
            )
        translated = {key: value for key, value in parts.items() if key in _ENFORCED}
        # In JSON Schema, an unknown format is only an annotation.
        if translated.get("format") not in _FORMATS:
            translated.pop("format", None)
        self._limit_counts(translated)
        if self._closed and _can_be_closed(translated):
            translated["additionalProperties"] = False
        return translated

    def _translate_value(self, key: str, value: Any, path: ParamPath) -> Any:
        if key in _MAPS:
            return {name: self.translate(each, (path, f".{name}")) for name, each in value.items()}
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            return [self.translate(each, (path, f"[{index}]")) for index, each in enumerate(value)]
        if key == "$ref":
            return self._translate_reference(value)
        return self.translate(value, path) if key in _SINGLES else value

    def _translate_reference(self, reference: str) -> str:
        pointer = self._targets.parse(reference)
        assert pointer is not None  # checked
        if pointer not in self._names:
            stem = _NAME_CHARACTERS.sub("_", pointer[-1])[:40] if pointer else "root"
            name = stem if stem not in self.references else f"{stem}.{len(self.references)}"
            self._names[pointer] = name
            self.references[name] = reference
            self._pending.append(pointer)
        return f"#/$defs/{self._names[pointer]}"

    def _limit_counts(self, schema: JsonSchema) -> None:
        for kind in ("Items", "Length", "Properties"):
            least, most = read_count(schema.get(f"min{kind}")), read_count(schema.get(f"max{kind}"))
            limit = get_count_limit(f"max{kind}", self._limits)
            if least is not None:
                schema[f"min{kind}"] = least
            if most is not None and limit is not None:
                limit = min(limit, _MAX_ITEMS) if kind == "Items" else limit
                schema[f"max{kind}"] = min(most, max(limit, least or 0))


def _can_be_closed(schema: JsonSchema) -> bool:
    properties = schema.get("properties")
    return (
        isinstance(properties, dict)
        and "additionalProperties" not in schema
        and "patternProperties" not in schema
        and set(schema.get("required") or ()) <= set(properties)
    )


def _check_size(schema: JsonSchema, limits: GrammarLimits, path: str) -> None:
    roomy = GrammarLimits(schema_bytes=_MAX_GROWTH * limits.schema_bytes, schema_depth=100)
    try:
        SchemaCheck(roomy).measure(schema, path)
    except InvalidRequest:
        raise InvalidRequest(
            f"The schema is too large with its references resolved. The limit is {_MAX_GROWTH} times "
            f"{limits.schema_bytes} bytes (setting grammars.schema_bytes).",
            param=path,
            code="unsupported_schema",
        ) from None


def _check_finite(definitions: JsonSchema, references: dict[str, str], path: str) -> None:
    """Reject references that always lead back to themselves: no finite value matches them.

    The compiler accepts such a schema, and stops enforcing it when it cannot continue.
    """
    graph = _RequirementGraph()
    named = {name: graph.add() for name in definitions}
    for name, schema in definitions.items():
        graph.require(named[name], [graph.build(schema, named)])
    finite = graph.solve()
    for name, node in named.items():
        if node not in finite:
            raise InvalidRequest(
                f"No finite value matches this schema: '{references[name]}' always contains itself.",
                param=path,
                code="unsupported_schema",
            )


class _RequirementGraph:
    """Schemas, and the parts that each needs for a finite value. `solve` takes linear time."""

    def __init__(self) -> None:
        self._missing: list[int] = []
        self._dependents: list[list[int]] = []
        self._built: dict[int, int] = {}

    def add(self) -> int:
        self._missing.append(0)
        self._dependents.append([])
        return len(self._missing) - 1

    def require(self, node: int, parts: Iterable[int], *, one: bool = False) -> int:
        """Let a node need all of the parts, or one of them."""
        for part in parts:
            self._dependents[part].append(node)
            self._missing[node] += not one
        self._missing[node] += one
        return node

    def build(self, schema: Any, named: dict[str, int]) -> int:
        """Return the node of a schema, given the nodes of the definitions."""
        if id(schema) in self._built:
            return self._built[id(schema)]
        node = self.add()
        if isinstance(schema, dict):
            self._built[id(schema)] = node
            parts = [self.build(each, named) for each in _list_required_parts(schema)]
            if "$ref" in schema:
                parts.append(named[schema["$ref"].removeprefix("#/$defs/")])
            parts += [
                self.require(self.add(), [self.build(each, named) for each in schema[key]], one=True)
                for key in ("anyOf", "oneOf")
                if key in schema
            ]
            self.require(node, parts)
        return node

    def solve(self) -> set[int]:
        """Return the nodes whose needs can be met."""
        solved = {node for node, missing in enumerate(self._missing) if missing == 0}
        pending = list(solved)
        while pending:
            for dependent in self._dependents[pending.pop()]:
                self._missing[dependent] -= 1
                if self._missing[dependent] == 0:
                    solved.add(dependent)
                    pending.append(dependent)
        return solved


def _list_required_parts(schema: JsonSchema) -> list[Any]:
    """Return the schemas in this one that every matching value has."""
    required = list(schema.get("allOf", ()))
    kinds = schema.get("type")
    if kinds in ("object", ["object"]):
        properties = schema.get("properties", {})
        required += [properties[name] for name in schema.get("required", ()) if name in properties]
    elif kinds in ("array", ["array"]):
        required += _list_required_items(schema)
    return required


def _list_required_items(schema: JsonSchema) -> list[Any]:
    minimum = schema.get("minItems", 0)
    first = schema.get("prefixItems", [])[:minimum]
    items = schema.get("items")
    return [*first, items] if minimum > len(first) and isinstance(items, dict) else first
