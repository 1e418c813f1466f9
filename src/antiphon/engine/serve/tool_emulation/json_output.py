"""A client's JSON schema and the values that must fit it, checked so that nobody else has to wait for long.

The validator is the library's, but for what could keep it busy without end: patterns, which are matched in linear time;
the comparison of each item with each other one; and schemas whose parts multiply, for which there is a limit of time.
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

_MOST_FAULTS = 5
# Seconds of work. The largest schema that OpenAI takes needs about half of it.
_LONGEST = 1.0

_Keyword = Callable[[Any, Any, Any, Any], Any]

_end: ContextVar[float] = ContextVar("end")


class OutputSchema:
    """A schema. Raises on one that is none."""

    def __init__(self, schema: dict[str, Any]) -> None:
        # It takes a while to load, and is needed where a backend cannot hold to a schema itself.
        from jsonschema.validators import Draft202012Validator, validator_for

        known = validator_for(schema, default=Draft202012Validator)
        try:
            kind = _guard(known, patterned=_mentions(schema, "patternProperties"))
            rules = _guard(known, patterned=False)(
                known.META_SCHEMA, registry=_no_references(), format_checker=_make_formats()
            )
            fault = next(_limit(rules.iter_errors(schema)), None)
        except RecursionError:
            raise _refuse("The schema is not valid: it is nested too deep") from None
        if fault is not None:
            raise _refuse(f"The schema is not valid: {fault.message}")
        self._validator = kind(schema, registry=_no_references())

    def list_faults(self, value: Any) -> list[str]:
        """What is wrong with the value, the first few things of it."""
        from referencing.exceptions import Unresolvable

        try:
            faults = itertools.islice(_limit(self._validator.iter_errors(value)), _MOST_FAULTS)
            return [f"{error.json_path}: {error.message}" for error in faults]
        except Unresolvable as error:
            raise _refuse(f"The schema refers to what it does not hold: {error}") from None
        except RecursionError:
            raise _refuse("The schema has no end: it refers to itself.") from None
        except (OverflowError, ValueError):
            return ["$: it holds a number that is too large to be checked"]


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="text.format.schema", code="invalid_value")


def _limit(errors: Iterator[Any]) -> Iterator[Any]:
    """The errors, as long as they do not take too much work. Other work that goes on meanwhile does not count."""
    _end.set(time.thread_time() + _LONGEST)
    yield from errors


def _mentions(schema: Any, keyword: str) -> bool:
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
def _guard(known: Any, *, patterned: bool) -> Any:
    """The library's validator with our own keywords. `patterned` is for schemas with `patternProperties`."""
    from jsonschema.validators import extend

    keywords = {
        **known.VALIDATORS,
        "pattern": _check_pattern,
        "patternProperties": _check_pattern_properties,
        "additionalProperties": functools.partial(_check_additional, known.VALIDATORS["additionalProperties"]),
        "uniqueItems": _check_unique,
    }
    if patterned:  # the library would match the patterns on its own
        keywords["unevaluatedProperties"] = _check_nothing
    kind = extend(known, {name: _time(keyword) for name, keyword in keywords.items()})
    fields = [(field.name, field.alias) for field in kind.__attrs_attrs__ if field.init]

    def evolve(self: Any, **changes: Any) -> Any:
        # The library would go by the `$schema` of a part, and take its own validator for it.
        return kind(**{alias: getattr(self, name) for name, alias in fields} | changes)

    kind.evolve = evolve
    return kind


def _time(keyword: _Keyword) -> _Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if time.thread_time() > _end.get():
            raise _refuse("The schema takes too long to check: it is too large, or its parts multiply.")
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


def _check_additional(known: _Keyword, validator: Any, rule: Any, instance: Any, schema: dict[str, Any]) -> Any:
    """As the library does, which is shown none but the properties that no pattern may stand for."""
    patterns = schema.get("patternProperties")
    if not patterns or not validator.is_type(instance, "object"):
        return known(validator, rule, instance, schema)
    named = schema.get("properties", {})
    others = {
        name: value
        for name, value in instance.items()
        if name not in named and all(matches_pattern(name, pattern) is False for pattern in patterns)
    }
    return known(validator, rule, others, {})


def _check_unique(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if wanted and validator.is_type(instance, "array"):
        written = [json.dumps(_plain(item), sort_keys=True) for item in instance]
        if len(set(written)) < len(written):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _plain(value: Any) -> Any:
    """A value in the one spelling that all its equals have: to JSON schemas 1.0 is 1."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_nothing(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    """A keyword that is left unchecked."""


@functools.cache
def _make_formats() -> Any:
    """What a schema's own words are held to: patterns are expressions, be it of a kind that is left unchecked."""
    from jsonschema import FormatChecker

    formats = FormatChecker(formats=())
    formats.checks("regex", raises=(re.error, OverflowError))(_is_expression)
    return formats


def _is_expression(text: Any) -> bool:
    return not isinstance(text, str) or matches_pattern("", text) is not None or bool(re.compile(text))


@functools.cache
def _no_references() -> Any:
    """A schema may refer to its own parts; nothing is fetched for it."""
    from referencing import Registry

    return Registry()


class JsonOutputCheck:
    """What an answer must be. Raises on a schema that is none."""

    def __init__(self, form: JsonSchemaFormat | JsonObjectFormat) -> None:
        self._form = form
        self._schema = OutputSchema(form.schema or {}) if isinstance(form, JsonSchemaFormat) else None

    def instruct(self) -> str:
        """What the model is told."""
        lines = ["Answer with one JSON value and nothing else: no explanation, no code fence."]
        if isinstance(self._form, JsonSchemaFormat):
            if self._form.description:
                lines.append(f"It is called '{self._form.name}': {self._form.description}")
            lines.append(f"It must fit this JSON schema:\n{json.dumps(self._form.schema, ensure_ascii=False)}")
        else:
            lines.append("It must be a JSON object.")
        return "\n".join(lines)

    def read(self, text: str) -> tuple[str, list[str]]:
        """The answer without what models put around it, and what is wrong with it."""
        bare = strip_fence(text).strip()
        try:
            value: Any = json.loads(bare, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return bare, [f"not valid JSON: {error}"]
        if self._schema is None:
            return bare, [] if isinstance(value, dict) else ["not a JSON object"]
        return bare, self._schema.list_faults(value)


def make_output_check(request: CreateRequest) -> JsonOutputCheck | None:
    """The check that the request's `text.format` asks for."""
    form = request.text.format if request.text is not None else None
    return JsonOutputCheck(form) if isinstance(form, JsonSchemaFormat | JsonObjectFormat) else None


def _refuse_constant(name: str) -> None:
    """Python reads NaN and the like, which no other reader of JSON does."""
    raise ValueError(f"{name} is no JSON value")
