"""Types as strict JSON Schema, and what strict mode cannot say."""

import dataclasses
from typing import Annotated, Any, Literal, Optional

import msgspec
import pydantic
import pytest
from msgspec import Meta

from antiphon.errors import ConfigError
from antiphon.tools.schema import JsonType, is_strict


@dataclasses.dataclass
class Node:
    name: str
    child: Annotated[Optional["Node"], Meta(description="The one below.")] = None


class Inner(pydantic.BaseModel):
    x: int


class Outer(pydantic.BaseModel):
    inner: Inner = pydantic.Field(description="Inside.")
    mode: Literal["a", "b"] = "a"


class Holder(msgspec.Struct):
    outer: Outer
    node: Annotated[Node, Meta(description="A tree.")]
    level: Literal[1, 2]


def test_a_reference_stands_alone_and_every_value_has_a_type() -> None:
    schema = JsonType(Holder, where="h").schema
    assert is_strict(schema)
    assert schema["properties"] == {
        "outer": {
            "type": "object",
            "properties": {
                "inner": {"anyOf": [{"$ref": "#/$defs/Inner"}], "description": "Inside."},
                "mode": {"anyOf": [{"enum": ["a", "b"], "type": "string"}, {"type": "null"}]},
            },
            "required": ["inner", "mode"],
            "additionalProperties": False,
        },
        "node": {"anyOf": [{"$ref": "#/$defs/Node"}], "description": "A tree."},
        "level": {"type": "integer", "enum": [1, 2]},
    }
    assert schema["$defs"]["Node"]["properties"]["child"] == {
        "anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}],
        "description": "The one below.",
    }


def test_what_it_describes_is_read_back() -> None:
    shape = JsonType(Holder, where="h")
    text = '{"outer":{"inner":{"x":1},"mode":null},"node":{"name":"a","child":{"name":"b","child":null}},"level":2}'
    assert shape.read(text) == Holder(Outer(inner=Inner(x=1)), Node("a", Node("b")), 2)


def test_deep_types_take_no_longer_than_wide_ones() -> None:
    kind: Any = int
    for depth in range(40):
        kind = msgspec.defstruct(f"Level{depth}", [("below", list[kind])])
    assert len(JsonType(kind, where="deep").schema["$defs"]) == 39


class Same(pydantic.BaseModel):
    class Inner(pydantic.BaseModel):
        y: str

    inner: Inner


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (list, "where: strict mode needs the type of what is in the list"),
        (dict, "where: strict mode cannot express an object with keys of any name"),
        (Annotated[Any, Meta(description="anything")], "where: strict mode needs a type"),
        (tuple[int, str], "where: strict mode cannot express 'prefixItems'"),
        (complex, "where: .*complex"),
    ],
)
def test_what_strict_mode_cannot_say_is_refused_by_its_place(kind: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        JsonType(kind, where="where")


@pytest.mark.parametrize(
    ("can_loosen", "remedy"),
    [(True, "take another type, or use strict=False."), (False, "take another type.")],
)
def test_it_says_what_can_be_done_by_whoever_reads_it(can_loosen: bool, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        JsonType(tuple[int, str], where="where", can_loosen=can_loosen)
    assert raised.value.message == f"where: strict mode cannot express 'prefixItems'; {remedy}"


def test_what_is_nested_too_deeply_is_an_error_as_any_other() -> None:
    shape = JsonType(Node, where="node")
    with pytest.raises(msgspec.DecodeError, match="JSON is nested too deeply"):
        shape.read("[" * 100_000)
    deep: dict[str, Any] | None = None
    for _ in range(2_000):
        deep = {"name": "a", "child": deep}
    with pytest.raises(msgspec.ValidationError, match="JSON is nested too deeply"):
        shape.convert(deep)


def test_two_types_of_one_name_are_not_mixed_up() -> None:
    holder = msgspec.defstruct("Two", [("one", Outer), ("other", Same)])
    with pytest.raises(ConfigError, match="two: there are two types called 'Inner'"):
        JsonType(holder, where="two")


def test_a_tuple_is_read_where_strict_mode_is_not_asked_for() -> None:
    assert JsonType(tuple[int, str], where="x", strict=False).read('[1, "a"]') == (1, "a")
