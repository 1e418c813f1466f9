"""Final answers of a Python type, and the three ways in which a model gives them.

`native`: the request has the schema as its `text.format`. `tool`: the answer is the call of a tool whose parameters are
the schema. `prompt`: the instructions have the schema.
"""

import contextlib
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from antiphon.errors import ConfigError
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.tools.base import make_name
from antiphon.tools.function import encode_json
from antiphon.tools.pydantic_types import support_pydantic
from antiphon.tools.schema import JsonType

OutputMode = Literal["native", "tool", "prompt"]

OUTPUT_TOOL = "final_answer"
"""The name of the tool with which a model gives its answer. A union of types has one tool for each of them."""

_PROMPT = "Give your final answer as one JSON object, with nothing before or after it, that matches this JSON Schema:\n"
_DESCRIPTION = "Give the final answer. This ends the task."

# A code block in Markdown.
_FENCED = re.compile(r"```\w*\s*\n(.*?)\n?\s*```", re.DOTALL)


class ObjectType:
    """A type whose JSON is an object. Strict mode requires one, so other types are wrapped in `value`."""

    def __init__(self, kind: Any, *, where: str) -> None:
        """Raises ConfigError for a type that has no strict schema."""
        self._plain = self._type = JsonType(kind, where=where, can_loosen=False)
        self.is_wrapped = self._plain.schema.get("type") != "object"
        if self.is_wrapped:
            wrapped = msgspec.defstruct("Output", [("value", support_pydantic(kind, where))])
            self._type = JsonType(wrapped, where=where, can_loosen=False)

    @property
    def schema(self) -> JsonObject:
        return self._type.schema

    def encode(self, value: Any) -> bytes:
        return encode_json({"value": value} if self.is_wrapped else value)

    def convert(self, data: Any) -> Any:
        """Return the value in decoded JSON. Raises msgspec.ValidationError."""
        value = self._type.convert(data)
        return value.value if self.is_wrapped else value

    def convert_plain(self, data: Any) -> Any:
        """Return the value whose own JSON, without the wrapper, is this. Raises msgspec.ValidationError."""
        return self._plain.convert(data)

    def unwrap(self, data: Any) -> Any:
        """Return the value in decoded JSON as it is, even if it is incomplete. None if there is none yet."""
        return data.get("value") if self.is_wrapped and isinstance(data, dict) else data


class ChoiceType:
    """A union of classes that msgspec does not support. The object has a property for each, and one of them is set."""

    is_wrapped = True

    def __init__(self, members: Sequence[type], *, where: str) -> None:
        """Raises ConfigError for a type that has no strict schema."""
        self._members = {each.__name__: each for each in members}
        self._types = [ObjectType(each, where=where) for each in members]
        fields = [(name, support_pydantic(each, where) | None) for name, each in self._members.items()]
        self._type = JsonType(msgspec.defstruct("Output", fields), where=where, can_loosen=False)

    @property
    def schema(self) -> JsonObject:
        return self._type.schema

    def encode(self, value: Any) -> bytes:
        members = list(self._members.values())
        kind = next((each for each in type(value).__mro__ if each in members), None)
        return encode_json({name: value if each is kind else None for name, each in self._members.items()})

    def convert(self, data: Any) -> Any:
        """Return the value in decoded JSON. Raises msgspec.ValidationError."""
        found = self._type.convert(data)
        values = [value for name in self._members if (value := getattr(found, name)) is not None]
        if len(values) != 1:
            raise msgspec.ValidationError(f"One of {', '.join(self._members)} must be set, and the others must be null")
        return values[0]

    def convert_plain(self, data: Any) -> Any:
        """Return the value whose own JSON is this, of the first type that fits. Raises msgspec.ValidationError."""
        for each in self._types[:-1]:
            with contextlib.suppress(msgspec.ValidationError):
                return each.convert_plain(data)
        return self._types[-1].convert_plain(data)

    def unwrap(self, data: Any) -> Any:
        """Return the value in decoded JSON as it is, even if it is incomplete. None if there is none yet."""
        values = data.values() if isinstance(data, dict) else ()
        return next((value for value in values if value is not None), None)


AnyType = ObjectType | ChoiceType


class TypedOutput:
    """A final answer of a Python type. `tools` are the types of the output tools, by name."""

    def __init__(self, kind: Any, *, where: str, mode: OutputMode = "native") -> None:
        """Raises ConfigError for a type that has no strict schema, and for an unknown mode."""
        if mode not in get_args(OutputMode):
            raise ConfigError(f"output_mode: {mode!r} is not one of {', '.join(get_args(OutputMode))}.")
        self.mode = mode
        self.type = _make_type(kind, where=where)
        self.tools: Mapping[str, AnyType] = _make_tools(kind, where=where) if mode == "tool" else {}
        described = _split(kind) if len(self.tools) > 1 else [kind]
        self._descriptions = {name: _describe(each) for name, each in zip(self.tools, described, strict=False)}

    @property
    def format(self) -> JsonObject | None:
        """The `text.format` of a request. None if the mode does not use it."""
        if self.mode != "native":
            return None
        return {"type": "json_schema", "name": "output", "schema": self.type.schema, "strict": True}

    @property
    def prompt(self) -> str:
        """The instructions for a model that gives the answer as text."""
        return _PROMPT + msgspec.json.encode(self.type.schema).decode()

    def describe_tools(self) -> list[JsonObject]:
        """Return the entries of the request's `tools`."""
        return [
            {
                "type": "function",
                "name": name,
                "description": self._descriptions[name],
                "parameters": each.schema,
                "strict": True,
            }
            for name, each in self.tools.items()
        ]

    def encode(self, value: Any) -> str:
        """Return the JSON of an answer with this value."""
        return self.type.encode(value).decode()

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
        return self.type.convert(data)

    def parse_call(self, name: str, arguments: str) -> Any:
        """Return the value in the call of an output tool. Raises msgspec.ValidationError or msgspec.DecodeError."""
        # The output type of an agent that resumes a run may have changed.
        return self.tools.get(name, self.type).convert(read_json(arguments or "{}"))

    def parse_result(self, text: str) -> Any:
        """Return the value in the result of a tool: the JSON of a value, or a text. Raises msgspec.ValidationError."""
        try:
            return self.type.convert_plain(read_json(text))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            try:
                return self.type.convert_plain(text)
            except msgspec.ValidationError:
                # The error of the first attempt names the field.
                raise msgspec.ValidationError(str(error)) from None


def make_output(kind: Any, mode: OutputMode, *, where: str) -> TypedOutput | None:
    """Return the output of an agent; None if it is the text of the answer. Raises ConfigError."""
    if kind is not None and not (kind is str and mode == "native"):
        return TypedOutput(kind, where=where, mode=mode)
    if mode != "native":
        raise ConfigError("output_mode requires an output_type.")
    return None


def _make_type(kind: Any, *, where: str) -> AnyType:
    members = _split(kind)
    try:
        return ObjectType(kind, where=where)
    except ConfigError:
        # msgspec does not support unions of several classes without tags.
        names = {each.__name__ for each in members if isinstance(each, type) and each is not type(None)}
        if len(names) < max(2, len(members)):
            raise
        return ChoiceType(members, where=where)


def _make_tools(kind: Any, *, where: str) -> dict[str, AnyType]:
    """Return one tool for each type of a union of objects, else one tool."""
    members = _split(kind)
    if len({_make_name(each) for each in members}) == len(members) > 1:
        each_alone = {_make_name(each): ObjectType(each, where=where) for each in members if each is not type(None)}
        if len(each_alone) == len(members) and not any(each.is_wrapped for each in each_alone.values()):
            return dict(each_alone)
    return {OUTPUT_TOOL: _make_type(kind, where=where)}


def _split(kind: Any) -> Sequence[Any]:
    """Return the types of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _make_name(kind: Any) -> str:
    return make_name(f"{OUTPUT_TOOL}_{getattr(kind, '__name__', kind)}")


def _describe(kind: Any) -> str:
    """Return the description of an output tool: with the docstring of its type, if it has one of its own."""
    text = (kind.__doc__ or "") if isinstance(kind, type) and kind.__module__ != "builtins" else ""
    # The docstring of a dataclass is its signature unless it has another one.
    is_own = bool(text.strip()) and not text.startswith(f"{kind.__name__}(")
    return f"{_DESCRIPTION} {' '.join(text.split())}" if is_own else _DESCRIPTION
