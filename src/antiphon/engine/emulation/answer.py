"""Answers in JSON from a backend that cannot enforce it: the model is told, and what it says is checked."""

import functools
import itertools
import json
from typing import TYPE_CHECKING, Any

from antiphon.engine.emulation.freeform import strip_fence
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_MOST_FAULTS = 5


class AnswerCheck:
    """What an answer must be. Raises on a schema that is none."""

    def __init__(self, form: JsonSchemaFormat | JsonObjectFormat) -> None:
        self._form = form
        self._validator = _make_validator(form.schema or {}) if isinstance(form, JsonSchemaFormat) else None

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
        if self._validator is None:
            return bare, [] if isinstance(value, dict) else ["not a JSON object"]
        return bare, _list_faults(self._validator, value)


def find_check(request: CreateRequest) -> AnswerCheck | None:
    """The check that the request's `text.format` asks for."""
    form = request.text.format if request.text is not None else None
    return AnswerCheck(form) if isinstance(form, JsonSchemaFormat | JsonObjectFormat) else None


def _refuse_constant(name: str) -> None:
    """Python reads NaN and the like, which no other reader of JSON does."""
    raise ValueError(f"{name} is no JSON value")


def _list_faults(validator: "Validator", value: Any) -> list[str]:
    from referencing.exceptions import Unresolvable

    try:
        faults = itertools.islice(validator.iter_errors(value), _MOST_FAULTS)
        return [f"{error.json_path}: {error.message}" for error in faults]
    except Unresolvable as error:
        raise InvalidRequest(
            f"The schema refers to what it does not hold: {error}", param="text.format.schema", code="invalid_value"
        ) from None
    except RecursionError:
        raise InvalidRequest(
            "The schema has no end: it refers to itself.", param="text.format.schema", code="invalid_value"
        ) from None


def _make_validator(schema: dict[str, Any]) -> "Validator":
    # It takes a while to load, and is needed where a backend cannot hold to a schema itself.
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        fault = error.message if isinstance(error, SchemaError) else "it is nested too deep"
        raise InvalidRequest(
            f"The schema is not valid: {fault}", param="text.format.schema", code="invalid_value"
        ) from None
    return kind(schema, registry=_no_references())


@functools.cache
def _no_references() -> Any:
    """A schema may refer to its own parts; nothing is fetched for it."""
    from referencing import Registry

    return Registry()
