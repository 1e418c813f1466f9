"""What a run is after."""

import re
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from antiphon.agent.limits import Limits, Prices
from antiphon.protocol.json_text import read_json
from antiphon.tools.schema import JsonType


class Output(Protocol):
    def read(self, text: str) -> Any:
        """The final answer that a text stands for. Raises msgspec.ValidationError or msgspec.DecodeError."""


class Task(Struct, frozen=True, kw_only=True):
    """What a run is after, and how far it may go.

    `output` is the form of the final answer. A call of the tool named `decision` is the run's end. After a turn of text
    alone that is no end, the model is told to go on with `nudge`.
    """

    limits: Limits = Limits()
    prices: Prices | None = None
    output: Output | None = None
    decision: str | None = None
    nudge: str | None = None
    turn_retries: int = 2


_FENCED = re.compile(r"```\w*\s*\n(.*?)\n?\s*```", re.DOTALL)


class TypedOutput:
    """A final answer of some type. What is no object is put into one, because strict mode wants one at the top."""

    def __init__(self, kind: Any, *, where: str) -> None:
        """Raises ConfigError for a type that has no strict schema."""
        self._shape = JsonType(kind, where=where, can_loosen=False)
        self._wrapped = self._shape.schema.get("type") != "object"
        if self._wrapped:
            self._shape = JsonType(msgspec.defstruct("Output", [("value", kind)]), where=where, can_loosen=False)

    @property
    def format(self) -> dict[str, Any]:
        """What a request asks for."""
        return {"type": "json_schema", "name": "output", "schema": self._shape.schema, "strict": True}

    def read(self, text: str) -> Any:
        """The value in an answer, which may be fenced off as code. Raises msgspec.ValidationError or DecodeError."""
        try:
            data = read_json(text)
        except msgspec.DecodeError:
            fenced = _FENCED.search(text)
            if fenced is None:
                raise
            data = read_json(fenced[1])
        value = self._shape.convert(data)
        return value.value if self._wrapped else value
