"""The goal of a run: its limits, the type of its final answer, and the tool call that ends it."""

import re
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from antiphon.agent.limits import Limits, Prices
from antiphon.protocol.json_text import read_json
from antiphon.tools.function import encode_json
from antiphon.tools.schema import JsonType, support_pydantic_unions

# A code block in Markdown.
_FENCED = re.compile(r"```\w*\s*\n(.*?)\n?\s*```", re.DOTALL)


class Output(Protocol):
    def encode(self, value: Any) -> str:
        """Return the text of a final answer."""

    def parse(self, text: str) -> Any:
        """Return the final answer in a text. Raises msgspec.ValidationError or msgspec.DecodeError."""


class Task(Struct, frozen=True, kw_only=True):
    """The goal and the limits of a run.

    `output` parses the final answer. A call of the tool named `decision` ends the run. With `reminder`, a turn of text
    alone does not end the run: the model gets this text and takes another turn. `output_retries` is the number of
    further answers after one that does not match the output type, or that an output guardrail has sent back.
    """

    limits: Limits = Limits()
    prices: Prices | None = None
    output: Output | None = None
    decision: str | None = None
    reminder: str | None = None
    turn_retries: int = 2
    output_retries: int = 1


class TypedOutput:
    """A final answer of a Python type.

    Strict mode requires an object at the top level, so the schema wraps other types in one.
    """

    def __init__(self, kind: Any, *, where: str) -> None:
        """Raises ConfigError for a type that has no strict schema."""
        self._type = JsonType(kind, where=where, can_loosen=False)
        self._is_wrapped = self._type.schema.get("type") != "object"
        if self._is_wrapped:
            wrapped = msgspec.defstruct("Output", [("value", support_pydantic_unions(kind))])
            self._type = JsonType(wrapped, where=where, can_loosen=False)

    @property
    def format(self) -> dict[str, Any]:
        """The `text.format` of a request."""
        return {"type": "json_schema", "name": "output", "schema": self._type.schema, "strict": True}

    def encode(self, value: Any) -> str:
        """Return the JSON of an answer with this value."""
        return encode_json({"value": value} if self._is_wrapped else value).decode()

    def parse(self, text: str) -> Any:
        """Return the value in an answer. The JSON may be in a Markdown code block.

        Raises msgspec.ValidationError or msgspec.DecodeError.
        """
        try:
            data = read_json(text)
        except msgspec.DecodeError:
            fenced = _FENCED.search(text)
            if fenced is None:
                raise
            data = read_json(fenced[1])
        value = self._type.convert(data)
        return value.value if self._is_wrapped else value
