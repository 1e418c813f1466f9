"""Filters on the attributes of files: parse one from JSON, and match attributes against it.

A file without the attribute matches `ne` and `nin`, and no other comparison. A string, a number and a boolean never
equal each other, and ordering compares two strings or two numbers only: other pairs do not match.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from antiphon.errors import InvalidRequest, MissingParameter

Value: TypeAlias = str | bool | int | float

MAX_DEPTH = 16
MAX_FILTERS = 256
_EQUALITY = frozenset({"eq", "ne"})
_ORDERING = frozenset({"gt", "gte", "lt", "lte"})
_MEMBERSHIP = frozenset({"in", "nin"})
_COMPOUND = frozenset({"and", "or"})
_TYPES = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "and", "or")


class Comparison(Struct, frozen=True):
    """A comparison of one attribute with a value. For `in` and `nin`, it is a set of kinds and values."""

    type: str
    key: str
    value: Any

    def matches(self, attributes: Mapping[str, Value]) -> bool:
        found = attributes.get(self.key)
        if self.type in _MEMBERSHIP:
            is_member = found is not None and (_kind(found), found) in self.value
            return is_member == (self.type == "in")
        if self.type in _EQUALITY:
            return (found is not None and _equal(found, self.value)) == (self.type == "eq")
        return found is not None and _kind(found) == _kind(self.value) and _compare(self.type, found, self.value)


class Compound(Struct, frozen=True):
    """A combination of filters: `and` or `or`."""

    type: str
    filters: "tuple[Filter, ...]"

    def matches(self, attributes: Mapping[str, Value]) -> bool:
        combine = all if self.type == "and" else any
        return combine(each.matches(attributes) for each in self.filters)


Filter: TypeAlias = Comparison | Compound


def parse_filter(value: Mapping[str, Any], path: str = "filters") -> Filter:
    """Parse a filter. Raises InvalidRequest with the param path of the first invalid field."""
    return _Parser().parse(value, path, 0)


class _Parser:
    def __init__(self) -> None:
        self._count = 0

    def parse(self, value: Any, path: str, depth: int) -> Filter:
        self._count += 1
        if depth > MAX_DEPTH or self._count > MAX_FILTERS:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_FILTERS} filters"
            raise InvalidRequest(f"'{path}': a filter may have at most {limit}.", param=path, code="invalid_value")
        if not isinstance(value, Mapping):
            raise _wrong_type(path, "an object")
        kind = _read(value, "type", path)
        if not isinstance(kind, str) or kind not in _TYPES:
            where = f"{path}.type"
            raise InvalidRequest(
                f"Invalid value for '{where}': it must be one of {', '.join(_TYPES)}.",
                param=where,
                code="invalid_value",
            )
        allowed = {"type", "filters"} if kind in _COMPOUND else {"type", "key", "value"}
        for name in value:
            if name not in allowed:
                where = f"{path}.{name}"
                raise InvalidRequest(f"Unknown parameter: '{where}'.", param=where, code="unknown_parameter")
        return self._parse_compound(kind, value, path, depth) if kind in _COMPOUND else _parse_one(kind, value, path)

    def _parse_compound(self, kind: str, value: Mapping[str, Any], path: str, depth: int) -> Compound:
        filters = _read(value, "filters", path)
        where = f"{path}.filters"
        if not isinstance(filters, list):
            raise _wrong_type(where, "an array")
        if not filters:
            raise InvalidRequest(f"'{where}' needs at least one filter.", param=where, code="invalid_value")
        return Compound(
            kind, tuple(self.parse(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(filters))
        )


def _parse_one(kind: str, value: Mapping[str, Any], path: str) -> Comparison:
    key = _read(value, "key", path)
    if not isinstance(key, str):
        raise _wrong_type(f"{path}.key", "a string")
    operand = _read(value, "value", path)
    where = f"{path}.value"
    if kind in _MEMBERSHIP:
        if not isinstance(operand, list):
            raise _wrong_type(where, f"an array, because 'type' is '{kind}'")
        for index, each in enumerate(operand):
            if not isinstance(each, str | bool | int | float):
                raise _wrong_type(f"{where}[{index}]", "a string, a number or a boolean")
        return Comparison(kind, key, frozenset((_kind(each), each) for each in operand))
    if not isinstance(operand, str | bool | int | float):
        raise _wrong_type(where, "a string, a number or a boolean")
    if kind in _ORDERING and isinstance(operand, bool):
        raise _wrong_type(where, f"a string or a number, because 'type' is '{kind}'")
    return Comparison(kind, key, operand)


def _read(value: Mapping[str, Any], name: str, path: str) -> Any:
    if name not in value:
        where = f"{path}.{name}"
        raise MissingParameter(f"Missing required parameter: '{where}'.", param=where)
    return value[name]


def _wrong_type(path: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid type for '{path}': expected {expected}.", param=path, code="invalid_type")


def _kind(value: Value) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def _equal(one: Value, other: Value) -> bool:
    return _kind(one) == _kind(other) and one == other


def _compare(kind: str, found: Any, value: Any) -> bool:
    match kind:
        case "gt":
            return bool(found > value)
        case "gte":
            return bool(found >= value)
        case "lt":
            return bool(found < value)
        case _:
            return bool(found <= value)
