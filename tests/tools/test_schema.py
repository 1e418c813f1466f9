"""Python types as strict JSON Schema, and decoding to them."""

import dataclasses
import datetime as dt
import decimal
import enum
import sys
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


def test_strict_schema_isolates_references_and_types_enums() -> None:
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


def test_value_that_matches_the_schema_is_decoded() -> None:
    json_type = JsonType(Holder, where="h")
    text = '{"outer":{"inner":{"x":1},"mode":null},"node":{"name":"a","child":{"name":"b","child":null}},"level":2}'
    assert json_type.decode(text) == Holder(Outer(inner=Inner(x=1)), Node("a", Node("b")), 2)


def test_deeply_nested_types_are_described_once_each() -> None:
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
        (list, "where: strict mode needs the type of the list's items"),
        (dict, "where: strict mode cannot express an object with arbitrary keys"),
        (Annotated[Any, Meta(description="anything")], "where: strict mode needs a type"),
        (tuple[int, str], "where: strict mode cannot express 'prefixItems'"),
        (complex, "where: .*complex"),
    ],
)
def test_unsupported_type_is_rejected_with_its_path(kind: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        JsonType(kind, where="where")


def test_dataclass_with_an_unknown_type_is_rejected() -> None:
    kind = dataclasses.make_dataclass("Incomplete", [("part", "Missing")])
    with pytest.raises(ConfigError) as raised:
        JsonType(kind, where="where")
    assert raised.value.message == "where: name 'Missing' is not defined. Define or import it at the top of the module."


@pytest.mark.parametrize(
    ("can_loosen", "remedy"),
    [(True, "use another type, or use strict=False."), (False, "use another type.")],
)
def test_error_suggests_strict_false_only_if_possible(can_loosen: bool, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        JsonType(tuple[int, str], where="where", can_loosen=can_loosen)
    assert raised.value.message == f"where: strict mode cannot express 'prefixItems'; {remedy}"


def test_deeply_nested_json_is_a_validation_error() -> None:
    json_type = JsonType(Node, where="node")
    with pytest.raises(msgspec.DecodeError, match="JSON is nested too deeply"):
        json_type.decode("[" * 100_000)
    deep: dict[str, Any] | None = None
    for _ in range(2_000):
        deep = {"name": "a", "child": deep}
    with pytest.raises(msgspec.ValidationError, match="JSON is nested too deeply"):
        json_type.convert(deep)


def test_two_types_of_one_name_are_rejected() -> None:
    holder = msgspec.defstruct("Two", [("one", Outer), ("other", Same)])
    with pytest.raises(ConfigError, match="two: there are two types called 'Inner'"):
        JsonType(holder, where="two")


def test_tuple_is_decoded_without_strict_mode() -> None:
    assert JsonType(tuple[int, str], where="x", strict=False).decode('[1, "a"]') == (1, "a")


def test_keys_of_an_object_are_decoded_as_numbers() -> None:
    assert JsonType(dict[int, str], where="x", strict=False).decode('{"1": "a"}') == {1: "a"}


class Move(msgspec.Struct, tag="move"):
    speed: int = 5


class Stop(msgspec.Struct, tag="stop"):
    speed: int | None


class Circle(pydantic.BaseModel):
    radius: int = 1


class Ring(pydantic.BaseModel):
    inner: int
    radius: int | None


class Many(pydantic.BaseModel):
    parts: list[Circle]


class One(pydantic.BaseModel):
    parts: Circle


@pytest.mark.parametrize(
    ("kind", "data", "value"),
    [
        (One | Many, {"parts": [{"radius": None}]}, Many(parts=[Circle()])),
        (Move | Stop, {"type": "stop", "speed": None}, Stop(None)),
        (Move | Stop, {"type": "move", "speed": None}, Move()),
        (Circle | Ring, {"inner": 3, "radius": None}, Ring(inner=3, radius=None)),
        (Circle | Ring, {"radius": None}, Circle()),
    ],
)
def test_null_that_is_a_default_in_another_option_of_a_union_stays(kind: Any, data: Any, value: Any) -> None:
    assert JsonType(kind, where="k").convert(data) == value


@pytest.mark.skipif(sys.version_info < (3, 12), reason="msgspec supports aliases from Python 3.12")
def test_alias_that_contains_itself_is_rejected() -> None:
    names: dict[str, Any] = {}
    exec("type Tree = dict[str, Tree] | int", names)
    with pytest.raises(ConfigError, match="where: a type that contains itself must be a class, not an alias"):
        JsonType(names["Tree"], where="where")


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class Owner(pydantic.BaseModel):
    pet: Pet


class Branch(pydantic.BaseModel):
    name: str
    branches: list["Branch"] = []


@dataclasses.dataclass
class Appointment:
    at: dt.datetime
    ends: dt.time | None
    others: list[dt.datetime]


DOG = {"kind": "dog", "name": "Rex"}


@pytest.mark.parametrize(
    ("kind", "data", "value"),
    [
        (Cat | Dog, DOG, Dog(kind="dog", name="Rex")),
        (Pet, DOG, Dog(kind="dog", name="Rex")),
        (Pet, {"kind": "cat", "lives": None}, Cat(kind="cat")),
        (list[Cat | Dog], [DOG], [Dog(kind="dog", name="Rex")]),
        (Cat | Dog | None, None, None),
        (Cat | str, "none", "none"),
        (Owner, {"pet": DOG}, Owner(pet=Dog(kind="dog", name="Rex"))),
    ],
)
def test_union_of_pydantic_models_is_strict_and_decoded(kind: Any, data: Any, value: Any) -> None:
    json_type = JsonType(kind, where="k")
    assert is_strict(json_type.schema)
    assert "oneOf" not in str(json_type.schema)
    assert "discriminator" not in str(json_type.schema)
    assert json_type.convert(data) == value
    with pytest.raises(msgspec.ValidationError):
        json_type.convert({"kind": "fish"})


def test_recursive_pydantic_model_is_an_object_at_the_top() -> None:
    json_type = JsonType(Branch, where="b")
    assert (json_type.schema["type"], is_strict(json_type.schema)) == ("object", True)
    value = json_type.convert({"name": "a", "branches": [{"name": "b", "branches": None}]})
    assert value == Branch(name="a", branches=[Branch(name="b")])


def test_dates_and_times_have_a_format() -> None:
    assert JsonType(Appointment, where="a").schema["properties"] == {
        "at": {"type": "string", "format": "date-time"},
        "ends": {"anyOf": [{"type": "string", "format": "time"}, {"type": "null"}]},
        "others": {"type": "array", "items": {"type": "string", "format": "date-time"}},
    }


class Download(pydantic.BaseModel):
    url: pydantic.HttpUrl
    hash: bytes


def test_formats_that_strict_mode_rejects_are_in_the_description() -> None:
    """can1357/oh-my-pi#206: 'uri' is not a valid format."""
    json_type = JsonType(Download, where="d")
    url = json_type.schema["properties"]["url"]
    assert url == {"type": "string", "description": "format: uri, maxLength: 2083, minLength: 1"}
    assert JsonType(bytes, where="b").schema == {"type": "string", "description": "contentEncoding: base64"}
    described = Annotated[decimal.Decimal, Meta(description="In francs.")]
    assert JsonType(described, where="p").schema == {"type": "string", "description": "In francs. (format: decimal)"}
    assert is_strict(json_type.schema)
    value = json_type.convert({"url": "https://example.com", "hash": "a"})
    assert value == Download(url=pydantic.HttpUrl("https://example.com"), hash=b"a")


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Account(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=2, max_length=20, pattern="^[a-z]+$", examples=["ada"])
    level: Level = pydantic.Field(ge=2)
    filters: pydantic.Json[str]
    path: Annotated[str, pydantic.WithJsonSchema({"type": "string", "pattern": "^(?!/).*$"})]
    sizes: list[int] = pydantic.Field(min_length=1, max_length=3)


def test_keywords_that_strict_mode_rejects_are_in_the_description() -> None:
    """openai/openai-python#2274: 'examples' is not permitted. vercel/ai#21037: regex lookaround is not supported."""
    json_type = JsonType(Account, where="a")
    assert json_type.schema["properties"] == {
        "name": {
            "type": "string",
            "pattern": "^[a-z]+$",
            "description": 'examples: ["ada"], maxLength: 20, minLength: 2',
        },
        "level": {"anyOf": [{"$ref": "#/$defs/Level"}], "description": "ge: 2"},
        "filters": {
            "type": "string",
            "description": 'contentMediaType: application/json, contentSchema: {"type":"string"}',
        },
        "path": {"type": "string", "description": "pattern: ^(?!/).*$"},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    }
    assert is_strict(json_type.schema)
    with pytest.raises(msgspec.ValidationError, match="name: String should have at least 2 characters"):
        json_type.convert({"name": "a", "level": 2, "filters": "[]", "path": "a", "sizes": [1]})
    loose = JsonType(Annotated[str, Meta(max_length=3)], where="s", strict=False)
    assert loose.schema == {"type": "string", "maxLength": 3}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "format": "uuid"}, True),
        ({"type": "string", "format": "uri"}, False),
        ({"type": "string", "title": "City", "pattern": "^[a-z]+$"}, True),
        ({"type": "string", "pattern": "^(?<!a)b$"}, False),
        ({"type": "string", "minLength": 1}, False),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, False),
        (
            {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"minLength": {"type": "integer"}},
                "required": ["minLength"],
                "additionalProperties": False,
            },
            True,
        ),
    ],
)
def test_schema_with_keywords_that_strict_mode_rejects_is_not_strict(schema: dict[str, Any], expected: bool) -> None:
    assert is_strict(schema) is expected


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    seconds: int = 60
    after: str | None = None


def test_converted_dataclass_has_its_defaults_when_it_is_encoded() -> None:
    json_type = JsonType(dict[str, list[Step]], where="p", strict=False)
    plan = json_type.convert({"a": [{"name": "x"}, {"name": "y", "seconds": 5}]})
    assert plan == {"a": [Step("x"), Step("y", 5)]}
    assert msgspec.to_builtins(plan) == {
        "a": [{"name": "x", "seconds": 60, "after": None}, {"name": "y", "seconds": 5, "after": None}]
    }


@dataclasses.dataclass(slots=True)
class Stage:
    first: Step
    count: int = 1


@dataclasses.dataclass
class Pause:
    name: str
    seconds: int = 60


@dataclasses.dataclass(slots=True)
class LongPause(Pause):
    minutes: int = 2


def test_dataclasses_with_slots_and_their_parts_have_their_defaults() -> None:
    stage = JsonType(Stage, where="p").convert({"first": {"name": "x", "seconds": None, "after": None}, "count": None})
    step = {"name": "x", "seconds": 60, "after": None}
    assert (stage, msgspec.to_builtins(stage)) == (Stage(Step("x")), {"first": step, "count": 1})
    long = JsonType(LongPause, where="p", strict=False).convert({"name": "x"})
    long.minutes = 3
    assert (msgspec.to_builtins(long), "minutes" in vars(long)) == ({"name": "x", "seconds": 60, "minutes": 3}, False)
