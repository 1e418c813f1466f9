"""JSON output: check an answer against `text.format`, in bounded time.

The validator is the `jsonschema` library's, with replacements for what could take unbounded time: patterns are matched
in linear time, unique items are compared by a set, and each validation has a time limit.
"""

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from antiphon.engine.serve.tool_emulation.freeform import strip_fence
from antiphon.engine.serve.tool_emulation.grammar import matches_pattern
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat

_MAX_FAULTS = 5
# CPU seconds per validation. The largest schema that OpenAI accepts needs about half of it.
_TIME_LIMIT = 1.0

_Keyword = Callable[[Any, Any, Any, Any], Any]

_deadline: ContextVar[float] = ContextVar("deadline")


class OutputSchema:
    """A client's JSON schema. Raises InvalidRequest if it is invalid."""

    def __init__(self, schema: dict[str, Any]) -> None:
        # Imported here: it loads slowly, and only backends without JSON schema support need it.
        from jsonschema.validators import Draft202012Validator, validator_for

        base = validator_for(schema, default=Draft202012Validator)
        try:
            validator = _extend_validator(base, has_patterns=_has_keyword(schema, "patternProperties"))
            meta_validator = _extend_validator(base, has_patterns=False)(
                base.META_SCHEMA, registry=_make_empty_registry(), format_checker=_make_format_checker()
            )
            fault = next(_limit_time(meta_validator.iter_errors(schema)), None)
        except RecursionError:
            raise _make_error("The schema is not valid: it is nested too deeply") from None
        if fault is not None:
            raise _make_error(f"The schema is not valid: {fault.message}")
        self._validator = validator(schema, registry=_make_empty_registry())

    def list_faults(self, value: Any) -> list[str]:
        """Return the first faults of the value."""
        from referencing.exceptions import Unresolvable

        try:
            faults = itertools.islice(_limit_time(self._validator.iter_errors(value)), _MAX_FAULTS)
            return [f"{error.json_path}: {error.message}" for error in faults]
        except Unresolvable as error:
            raise _make_error(f"The schema has an unresolvable reference: {error}") from None
        except RecursionError:
            raise _make_error("The schema refers to itself without end.") from None
        except (OverflowError, ValueError):
            return ["$: it has a number that is too large to check"]


def _make_error(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="text.format.schema", code="invalid_value")


def _limit_time(errors: Iterator[Any]) -> Iterator[Any]:
    """Yield the errors, with a time limit on this thread's CPU time."""
    _deadline.set(time.thread_time() + _TIME_LIMIT)
    yield from errors


def _has_keyword(schema: Any, keyword: str) -> bool:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if keyword in each:
                return True
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return False


@functools.cache
def _extend_validator(base: Any, *, has_patterns: bool) -> Any:
    """Return the library's validator class with our keywords. `has_patterns`: the schema has `patternProperties`."""
    from jsonschema.validators import extend

    keywords = {
        **base.VALIDATORS,
        "pattern": _check_pattern,
        "patternProperties": _check_pattern_properties,
        "additionalProperties": functools.partial(_check_additional, base.VALIDATORS["additionalProperties"]),
        "uniqueItems": _check_unique,
    }
    if has_patterns:  # the library would match the patterns with `re`
        keywords["unevaluatedProperties"] = _check_nothing
    kind = extend(base, {name: _add_deadline(keyword) for name, keyword in keywords.items()})
    fields = [(field.name, field.alias) for field in kind.__attrs_attrs__ if field.init]

    def evolve(self: Any, **changes: Any) -> Any:
        # The library would use its own validator for a subschema with `$schema`.
        return kind(**{alias: getattr(self, name) for name, alias in fields} | changes)

    kind.evolve = evolve
    return kind


def _add_deadline(keyword: _Keyword) -> _Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if time.thread_time() > _deadline.get():
            raise _make_error("The schema takes too long to check: it is too large or too complex.")
        return keyword(validator, value, instance, schema)

    return check


def _check_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if validator.is_type(instance, "string") and matches_pattern(instance, pattern) is False:
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _check_pattern_properties(validator: Any, patterns: dict[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, part in patterns.items():
        for name, value in instance.items():
            if matches_pattern(name, pattern):
                yield from validator.descend(value, part, path=name, schema_path=pattern)


def _check_additional(library_check: _Keyword, validator: Any, rule: Any, instance: Any, schema: dict[str, Any]) -> Any:
    """Call the library's check with the properties that no pattern matches."""
    patterns = schema.get("patternProperties")
    if not patterns or not validator.is_type(instance, "object"):
        return library_check(validator, rule, instance, schema)
    named = schema.get("properties", {})
    others = {
        name: value
        for name, value in instance.items()
        if name not in named and all(matches_pattern(name, pattern) is False for pattern in patterns)
    }
    return library_check(validator, rule, others, {})


def _check_unique(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if wanted and validator.is_type(instance, "array"):
        encoded = [json.dumps(_normalize(item), sort_keys=True) for item in instance]
        if len(set(encoded)) < len(encoded):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _normalize(value: Any) -> Any:
    """Return a value that is equal for equal JSON values: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {name: _normalize(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_normalize(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_nothing(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    """Accept any value: this keyword is not checked."""


@functools.cache
def _make_format_checker() -> Any:
    """Return a checker for `regex` only: a schema's patterns must be regular expressions, even unsupported ones."""
    from jsonschema import FormatChecker

    formats = FormatChecker(formats=())
    formats.checks("regex", raises=(re.error, OverflowError))(_is_regex)
    return formats


def _is_regex(text: Any) -> bool:
    return not isinstance(text, str) or matches_pattern("", text) is not None or bool(re.compile(text))


@functools.cache
def _make_empty_registry() -> Any:
    """Return a registry that fetches nothing: a schema may only refer to its own parts."""
    from referencing import Registry

    return Registry()


class JsonOutputCheck:
    """The check of an answer against `text.format`. Raises InvalidRequest if the schema is invalid."""

    def __init__(self, form: JsonSchemaFormat | JsonObjectFormat) -> None:
        self._form = form
        self._schema = OutputSchema(form.schema or {}) if isinstance(form, JsonSchemaFormat) else None

    def make_instructions(self) -> str:
        """Return the instructions for the model."""
        lines = ["Answer with one JSON value and nothing else: no explanation, no code fence."]
        if isinstance(self._form, JsonSchemaFormat):
            if self._form.description:
                lines.append(f"It is called '{self._form.name}': {self._form.description}")
            lines.append(f"It must fit this JSON schema:\n{json.dumps(self._form.schema, ensure_ascii=False)}")
        else:
            lines.append("It must be a JSON object.")
        return "\n".join(lines)

    def parse(self, text: str) -> tuple[str, list[str]]:
        """Return the answer without a code fence and whitespace around it, and its faults."""
        bare = strip_fence(text).strip()
        try:
            value: Any = json.loads(bare, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return bare, [f"not valid JSON: {error}"]
        if self._schema is None:
            return bare, [] if isinstance(value, dict) else ["not a JSON object"]
        return bare, self._schema.list_faults(value)


def make_output_check(request: CreateRequest) -> JsonOutputCheck | None:
    """Return the check for the request's `text.format`, or None if it is plain text."""
    form = request.text.format if request.text is not None else None
    return JsonOutputCheck(form) if isinstance(form, JsonSchemaFormat | JsonObjectFormat) else None


def _refuse_constant(name: str) -> None:
    """Reject NaN and Infinity, which Python accepts and JSON does not."""
    raise ValueError(f"{name} is not a JSON value")
