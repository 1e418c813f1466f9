"""Answers in JSON from a backend that cannot enforce it: the model is told, and what it says is checked."""

import json
from typing import Any

from antiphon.engine.emulation.freeform import strip_fence
from antiphon.engine.emulation.schema import Schema
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat


class AnswerCheck:
    """What an answer must be. Raises on a schema that is none."""

    def __init__(self, form: JsonSchemaFormat | JsonObjectFormat) -> None:
        self._form = form
        self._schema = Schema(form.schema or {}) if isinstance(form, JsonSchemaFormat) else None

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


def find_check(request: CreateRequest) -> AnswerCheck | None:
    """The check that the request's `text.format` asks for."""
    form = request.text.format if request.text is not None else None
    return AnswerCheck(form) if isinstance(form, JsonSchemaFormat | JsonObjectFormat) else None


def _refuse_constant(name: str) -> None:
    """Python reads NaN and the like, which no other reader of JSON does."""
    raise ValueError(f"{name} is no JSON value")
