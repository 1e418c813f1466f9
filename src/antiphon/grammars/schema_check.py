"""Checks of a client's JSON schema before it is compiled: the form of each keyword, and the limits of the settings.

Compiling a schema costs more than its length: `minItems` is written out, and so are most other numbers. The checks take
time proportional to the size of the schema, and nothing is written out.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn

from antiphon.config.settings import GrammarLimits
from antiphon.errors import InvalidRequest
from antiphon.grammars.patterns import PatternFault, exceeds_size
from antiphon.grammars.references import Pointer, References

# A param path as a chain of its steps, because few are ever shown: (the path before, the last step).
ParamPath = tuple["ParamPath | None", str]

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# Keywords that assert nothing: an `anyOf` or `$ref` beside them stays cheap to compile.
_ANNOTATIONS = frozenset({
    "$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
})  # fmt: skip
_SIMPLE_KEYWORDS = _ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "format",
    "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
}  # fmt: skip
# A schema within these bounds compiles in milliseconds. docs/decisions/029 has the measurements.
_SIMPLE_VALUES = 500
_SIMPLE_BYTES = 16 * 1024
_SIMPLE_REFERENCES = 50
_SIMPLE_ITEMS = 100
_SIMPLE_LENGTH = 256
_SIMPLE_NUMBER = 10**12
_SIMPLE_NUMBER_LENGTH = 16
# JSON levels of one schema level: `properties`, a name, the schema.
_LEVELS = 2
_MAX_DIGITS = 300
_MAX_DECIMALS = 9
_MAX_PATH_LENGTH = 1000
_MAX_SHOWN = 60


class SchemaCheck:
    """Checks the schemas of one request. The limits on size and references hold for all of them together.

    After `check`, `is_simple` is True if all schemas are cheap to compile, and `values` is the number of JSON values.
    """

    def __init__(self, limits: GrammarLimits) -> None:
        self.is_simple = True
        self.values = 0
        self._limits = limits
        self._bytes = 0
        self._references = 0
        self._targets = References(None)
        self._visited: dict[int, Any] = {}
        self._pending: dict[Pointer, ParamPath] = {}

    def check(self, schema: Any, param: str) -> None:
        """Check one schema. Raises InvalidRequest that names the keyword."""
        self.measure(schema, param)
        self._targets = References(schema)
        root: ParamPath = (None, param)
        self._visit(schema, root, 0)
        while self._pending:
            pointer, reference_path = self._pending.popitem()
            try:
                target = self._targets.find(pointer)
            except LookupError:
                raise InvalidRequest(
                    "'$ref' names a part that the schema does not have.",
                    param=join_path(reference_path),
                    code="invalid_value",
                ) from None
            if id(target) not in self._visited:
                self._visit(target, (root, "".join(f".{step}" for step in pointer)), 0)
        self.is_simple &= (
            self.values <= _SIMPLE_VALUES and self._bytes <= _SIMPLE_BYTES and self._references <= _SIMPLE_REFERENCES
        )

    def measure(self, schema: Any, param: str) -> None:
        """Check the size and the depth of a schema, in one pass that ends at the limit."""
        path: ParamPath = (None, param)
        most, deepest = self._limits.schema_bytes, _LEVELS * (self._limits.schema_depth + 1)
        pending = [(schema, 0)]
        while pending:
            value, depth = pending.pop()
            self.values += 1
            self._bytes += _estimate_bytes(value)
            if isinstance(value, int) and value.bit_length() > 4 * _MAX_DIGITS:
                _refuse_form(value, f"a number can have {_MAX_DIGITS} digits", path)
            if depth > deepest:
                self._refuse("The schema is nested too deeply", path, self._limits.schema_depth, "schema_depth")
            if self._bytes > most:
                self._refuse("The schemas of the request are too large", path, most, "schema_bytes")
            if isinstance(value, dict):
                self._bytes += sum(map(len, value)) + 3 * len(value)
                pending += [(each, depth + 1) for each in value.values()]
            elif isinstance(value, list):
                pending += [(each, depth + 1) for each in value]

    def _visit(self, schema: Any, path: ParamPath, depth: int) -> None:
        if depth > self._limits.schema_depth:
            self._refuse("The schema is nested too deeply", path, self._limits.schema_depth, "schema_depth")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            _refuse_form(schema, "a schema must be an object or a boolean", path)
        self._visited[id(schema)] = schema
        for keyword, value in schema.items():
            check = _CHECKS.get(keyword)
            if check is not None:
                check(self, keyword, value, (path, f".{keyword}"), depth)
        if self.is_simple:
            self.is_simple = _SIMPLE_KEYWORDS.issuperset(schema) and (
                ("anyOf" not in schema and "$ref" not in schema) or len(schema.keys() - _ANNOTATIONS) == 1
            )

    # Keywords with schemas

    def _check_map(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if not isinstance(value, dict):
            _refuse_form(value, f"'{keyword}' must be an object", path)
        if keyword in ("properties", "patternProperties"):
            self._limit(len(value), f"'{keyword}' has {len(value)} entries", path, "properties")
        for name, each in value.items():
            inner = (path, f".{name}")
            if keyword == "patternProperties":
                self._check_pattern(keyword, name, inner, depth)
            self._visit(each, inner, depth + 1)

    def _check_list(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if not isinstance(value, list) or not value:
            _refuse_form(value, f"'{keyword}' must be a non-empty array", path)
        self._limit(len(value), f"'{keyword}' has {len(value)} entries", path, "alternatives")
        for index, each in enumerate(value):
            self._visit(each, (path, f"[{index}]"), depth + 1)

    def _check_items(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if isinstance(value, list):  # older drafts
            self.is_simple = False
            if value:
                self._check_list(keyword, value, path, depth)
        else:
            self._visit(value, path, depth + 1)

    def _check_single(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        self._visit(value, path, depth + 1)

    def _check_reference(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if not isinstance(value, str):
            _refuse_form(value, f"'{keyword}' must be a string", path)
        self._references += 1
        if self._references > self._limits.references:
            self._refuse(
                "The schemas of the request have too many references", path, self._limits.references, "references"
            )
        pointer = self._targets.parse(value)
        if pointer is None:
            raise InvalidRequest(
                f"'{keyword}' must name a part of the same schema, as in '#/$defs/name'.",
                param=join_path(path),
                code="unsupported_schema",
            )
        self._pending.setdefault(pointer, path)

    # Keywords with numbers

    def _check_count(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        count = read_count(value)
        if count is None:
            _refuse_form(value, f"'{keyword}' must be a non-negative integer", path)
        name = _COUNT_LIMITS.get(keyword)
        # A lower maximum still matches the schema, so only a minimum is refused.
        if name is not None and keyword.startswith("min"):
            self._limit(count, f"'{keyword}' is {_shorten(value)}", path, name)
        if count > (_SIMPLE_ITEMS if keyword.endswith("Items") else _SIMPLE_LENGTH):
            self.is_simple = False

    def _check_number(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if keyword.startswith("exclusive") and isinstance(value, bool):  # draft 4
            return
        if not _is_finite_number(value):
            _refuse_form(value, f"'{keyword}' must be a finite number", path)
        if abs(value) > _SIMPLE_NUMBER or (isinstance(value, float) and len(repr(value)) > _SIMPLE_NUMBER_LENGTH):
            self.is_simple = False

    def _check_multiple(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if not _is_finite_number(value) or value <= 0:
            _refuse_form(value, f"'{keyword}' must be a number above 0", path)
        digits, exponent = _split_decimal(value)
        limit = self._limits.multiple_of
        if exponent > _MAX_DECIMALS or digits > limit:
            self._refuse(
                f"'{keyword}' is {_shorten(value)}, which is too large or too precise", path, limit, "multiple_of"
            )

    # Keywords with values

    def _check_type(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        kinds = value if isinstance(value, list) else [value]
        if not kinds or len(kinds) > len(_TYPES) or not all(isinstance(each, str) and each in _TYPES for each in kinds):
            _refuse_form(value, f"'{keyword}' must be one of {', '.join(sorted(_TYPES))}, or an array of them", path)

    def _check_enum(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if not isinstance(value, list) or not value:
            _refuse_form(value, f"'{keyword}' must be a non-empty array", path)
        self._limit(len(value), f"'{keyword}' has {len(value)} entries", path, "enum_values")
        for index, each in enumerate(value):
            self._check_value(each, (path, f"[{index}]"))

    def _check_const(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        self._check_value(value, path)

    def _check_value(self, value: Any, path: ParamPath) -> None:
        pending = [value]
        while pending:
            each = pending.pop()
            if isinstance(each, (dict, list)):
                self.is_simple = False
                pending += each.values() if isinstance(each, dict) else each
            elif isinstance(each, (int, float)) and not isinstance(each, bool) and not _is_finite_number(each):
                _refuse_form(each, "the number is too large", path)

    def _check_required(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            _refuse_form(value, f"'{keyword}' must be an array of strings", path)
        self._limit(len(value), f"'{keyword}' has {len(value)} entries", path, "properties")

    def _check_pattern(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if not isinstance(value, str):
            _refuse_form(value, f"'{keyword}' must be a string", path)
        limit = self._limits.pattern_size
        try:
            is_too_large = exceeds_size(value, limit)
        except PatternFault as fault:
            _refuse_form(value, f"'{keyword}' must be a regular expression: {fault}", path)
        if is_too_large:
            self._refuse(f"'{keyword}' is too large with its repetitions written out", path, limit, "pattern_size")

    def _check_string(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if not isinstance(value, str):
            _refuse_form(value, f"'{keyword}' must be a string", path)

    def _check_boolean(self, keyword: str, value: Any, path: ParamPath, depth: int) -> None:
        if not isinstance(value, bool):
            _refuse_form(value, f"'{keyword}' must be true or false", path)

    def _limit(self, count: int, fact: str, path: ParamPath, name: str) -> None:
        limit: int = getattr(self._limits, name)
        if count > limit:
            self._refuse(fact, path, limit, name)

    def _refuse(self, fact: str, path: ParamPath, limit: int, name: str) -> NoReturn:
        raise InvalidRequest(
            f"{fact}. The limit is {limit} (setting grammars.{name}).", param=join_path(path), code="unsupported_schema"
        )


_Check = Callable[[SchemaCheck, str, Any, ParamPath, int], None]

_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), SchemaCheck._check_map),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), SchemaCheck._check_list),
    **dict.fromkeys(("additionalProperties", "additionalItems"), SchemaCheck._check_single),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), SchemaCheck._check_count
    ),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), SchemaCheck._check_number),
    **dict.fromkeys(("format", "$schema", "$id", "$anchor"), SchemaCheck._check_string),
    "items": SchemaCheck._check_items,
    "$ref": SchemaCheck._check_reference,
    "multipleOf": SchemaCheck._check_multiple,
    "type": SchemaCheck._check_type,
    "enum": SchemaCheck._check_enum,
    "const": SchemaCheck._check_const,
    "required": SchemaCheck._check_required,
    "pattern": SchemaCheck._check_pattern,
    "uniqueItems": SchemaCheck._check_boolean,
}
_COUNT_LIMITS = {
    "minItems": "items",
    "maxItems": "items",
    "minLength": "length",
    "maxLength": "length",
    "minProperties": "properties",
    "maxProperties": "properties",
}


def join_path(path: ParamPath) -> str:
    """Return a param path as text."""
    steps: list[str] = []
    rest: ParamPath | None = path
    while rest is not None:
        rest, step = rest
        steps.append(step)
    text = "".join(reversed(steps))
    return text if len(text) <= _MAX_PATH_LENGTH else f"{text[:_MAX_PATH_LENGTH]}..."


def count_values(value: Any, most: int) -> int:
    """Return the number of JSON values in a value. Counting ends above `most`."""
    count = 0
    pending = [value]
    while pending and count <= most:
        each = pending.pop()
        count += 1
        if isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, list):
            pending += each
    return count


def get_count_limit(keyword: str, limits: GrammarLimits) -> int | None:
    """Return the limit of a keyword such as `maxItems`. None for other keywords."""
    name = _COUNT_LIMITS.get(keyword)
    return None if name is None else getattr(limits, name)


def read_count(value: Any) -> int | None:
    """Return the value of a keyword such as `minItems`. None if it is not a count: 3.0 is a count, True is not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _refuse_form(value: Any, rule: str, path: ParamPath) -> NoReturn:
    raise InvalidRequest(
        f"The schema is not valid: {rule}, not {_shorten(value)}.", param=join_path(path), code="invalid_value"
    ) from None


def _estimate_bytes(value: Any) -> int:
    """Return the approximate length of a value in JSON. The contents of a container do not count."""
    if isinstance(value, str):
        return len(value) + 3
    # Python refuses to write very long integers.
    return value.bit_length() // 3 + 2 if isinstance(value, int) else 8


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 10**_MAX_DIGITS if isinstance(value, int) else math.isfinite(value)


def _split_decimal(value: float) -> tuple[int, int]:
    """Return the digits of a positive number as an integer, and the number of decimal places."""
    number = Decimal(repr(value))
    exponent = int(number.normalize().as_tuple().exponent)
    if exponent >= 0:
        return int(number), 0
    return int(number.scaleb(-exponent)), -exponent


def _shorten(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 4 * _MAX_DIGITS:
        return "a very long number"
    if isinstance(value, (dict, list)) and value:
        return "an object" if isinstance(value, dict) else "an array"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
