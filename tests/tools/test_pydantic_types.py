"""Fields and types of pydantic in the parameters of tools, and in output types."""

import ast
import dataclasses
import datetime as dt
import subprocess
import sys
import threading
import typing
import uuid
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NotRequired, Required, TypedDict, TypeVar
from unittest import mock

import msgspec
import pydantic
import pydantic_core
import pytest
import typing_extensions
from pydantic import AfterValidator, BeforeValidator, Field

from antiphon.errors import ConfigError
from antiphon.tools.base import ToolContext
from antiphon.tools.function import CallableTool, make_result, tool
from antiphon.tools.schema import JsonType, is_strict

CONTEXT = ToolContext(run_id="run_1", call_id="call_1", idempotency_key="key_1")


def make(kind: Any, *default: Any) -> CallableTool[..., Any]:
    """Return a tool with one parameter, which returns the representation of its argument."""

    def show(value):  # type: ignore[no-untyped-def]
        """Show a value.

        Args:
            value: From the docstring.
        """
        return repr(value)

    show.__annotations__["value"] = kind
    show.__defaults__ = default or None
    return tool(show)


async def invoke(made: CallableTool[..., Any], **arguments: Any) -> str:
    return str((await made.invoke(msgspec.json.encode(arguments).decode(), CONTEXT)).output)


class Code:
    """A type like `EmailStr`: it is validated as a text."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return handler(Annotated[str, pydantic.StringConstraints(pattern="^[A-Za-z]{2}$", to_lower=True)])


class Address(pydantic.BaseModel):
    city: str = Field(min_length=2)
    code: Code = "ch"  # type: ignore[assignment]


class Booking(pydantic.BaseModel, strict=True):
    day: dt.date
    seats: int


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


@dataclasses.dataclass
class Order:
    amount: Annotated[int, Field(ge=1)]
    unit: str = Field(default="piece", max_length=5)


@pydantic.dataclasses.dataclass
class Checked:
    amount: Annotated[int, AfterValidator(lambda number: number * 2)]


class Options(typing_extensions.TypedDict):
    level: Annotated[int, Field(le=3)]


class Town(msgspec.Struct):
    name: str


@dataclasses.dataclass
class Holder:
    town: Town


@dataclasses.dataclass
class Measured:
    height: Annotated[int, msgspec.Meta(ge=1)]
    width: Annotated[int, Field(ge=1)]


T = TypeVar("T")


@dataclasses.dataclass
class Pair(Generic[T]):
    first: T
    second: Annotated[int, Field(ge=1)]


@pydantic.dataclasses.dataclass
class Ranked(Generic[T]):
    value: T
    rank: Annotated[int, AfterValidator(lambda number: number * 2)]


Amount = typing_extensions.TypeAliasType("Amount", Annotated[int, Field(ge=1)])
Few = typing_extensions.TypeAliasType("Few", Annotated[list[T], Field(max_length=2)], type_params=(T,))
Percent = typing.NewType("Percent", Annotated[int, Field(le=100)])


@dataclasses.dataclass
class Discount:
    percent: Percent


class Size(TypedDict, total=False):
    """A size."""

    width: Required[Annotated[int, Field(ge=1)]]
    unit: Literal["m", "cm"]


class Box(Size):
    """A box."""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[misc]
    label: NotRequired[Annotated[str, Field(max_length=3)]]
    inner: Size | None


class Listing(TypedDict, Generic[T]):
    rows: list[T]
    size: Annotated[int, Field(ge=1)]


class Note:
    """An annotation that is of neither package."""

    description = "From another annotation."


NUMBER = {"type": "integer", "minimum": 1, "maximum": 5, "description": "How good."}
TEXT = {"type": "string", "description": "From the docstring."}


@pytest.mark.parametrize(
    ("made", "schema", "good", "shown", "bad", "reason"),
    [
        (
            make(Annotated[int, Field(ge=1, le=5, description="How good.")]),
            NUMBER,
            4,
            "4",
            6,
            "Expected `int` <= 5",
        ),
        (make(int, Field(ge=1, le=5, description="How good.")), NUMBER, 4, "4", 0, "Expected `int` >= 1"),
        (make(int, Field(..., ge=1, le=5, description="How good.")), NUMBER, 4, "4", 0, "Expected `int` >= 1"),
        (
            make(str, Field(min_length=2, pattern="^[a-z]+$")),
            TEXT | {"pattern": "^[a-z]+$", "description": "From the docstring. (minLength: 2)"},
            "ab",
            "'ab'",
            "AB",
            "Expected `str` matching regex",
        ),
        (make(Annotated[str, AfterValidator(str.upper)]), TEXT, "ab", "'AB'", 5, "Input should be a valid string"),
        (make(Annotated[int, BeforeValidator(len)]), TEXT | {"type": "integer"}, "abc", "3", 5, "has no len"),
        (make(Annotated[int, "Some.", Field(ge=1)]), {"minimum": 1, "description": "Some."}, 1, "1", 9, ""),
        (make(pydantic.PositiveInt), {"type": "integer", "exclusiveMinimum": 0}, 4, "4", 0, "Expected `int` >= 1"),
        (make(pydantic.constr(strip_whitespace=True)), TEXT, " a ", "'a'", 4, "valid string"),
        (
            make(pydantic.SecretStr),
            TEXT | {"description": "From the docstring. (format: password, writeOnly: true)"},
            "a",
            "SecretStr('**********')",
            4,
            "valid string",
        ),
        (make(Code), TEXT | {"pattern": "^[A-Za-z]{2}$"}, "DE", "'de'", "German", "should match pattern"),
        (make(list[Code]), {}, ["DE"], "['de']", ["German"], r"pattern '.*' - at `\$.value\[0\]`"),
        (make(Code | None), {}, "DE", "'de'", "German", "should match pattern"),
        (
            make(Address),
            {},
            {"city": "Bern", "code": None},
            "Address(city='Bern', code='ch')",
            {"city": "B"},
            "city: String",
        ),
        (
            make(Booking),
            {},
            {"day": "2026-01-31", "seats": 2},
            "Booking(day=datetime.date(2026, 1, 31), seats=2)",
            {"day": "2026-01-31", "seats": "2"},
            "seats: Input should be a valid integer",
        ),
        (
            make(Annotated[uuid.UUID, Field(strict=True)]),
            TEXT | {"format": "uuid"},
            "30e07fd2-e164-40be-89e2-95f08ed61a5c",
            "UUID('30e07fd2-e164-40be-89e2-95f08ed61a5c')",
            "30e0",
            "valid UUID",
        ),
        (make(Cat | Dog, Field(discriminator="kind")), {}, {"kind": "cat"}, "Cat(kind='cat')", {"kind": "cow"}, "kind"),
        (make(Annotated[list[int], Field(max_length=2)]), {}, [1, 2], "[1, 2]", [1, 2, 3], "length <= 2"),
        (
            make(Annotated[Decimal, Field(ge=0, decimal_places=2)], Decimal("1.50")),
            {},
            "0.25",
            "Decimal('0.25')",
            -1,
            "",
        ),
        (make(Order), {}, {"amount": 1, "unit": None}, "Order(amount=1, unit='piece')", {"amount": 0}, "amount: Input"),
        (make(list[Checked]), {}, [{"amount": 4}], "[Checked(amount=8)]", [{"amount": ""}], "amount: Input"),
        (
            make(Box),
            {},
            {"width": 2, "inner": {"width": 1}},
            "{'width': 2, 'inner': {'width': 1}}",
            {"width": 2},
            "inner",
        ),
        (make(list[Box]), {}, [{"width": 1, "inner": None}], "[{'width': 1, 'inner': None}]", [{"width": 0}], "width"),
        (make(Box | Cat), {}, {"kind": "cat"}, "Cat(kind='cat')", {"width": 1, "inner": {"width": 0}}, "inner.width"),
        (
            make(Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], Field(max_length=2)]),
            TEXT | {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 2},
            [1],
            "[1]",
            [0],
            "Expected `int` >= 1",
        ),
        (make(Annotated[bytes, Field(min_length=1)]), {}, "aGk=", "b'hi'", "", ""),
        (
            make(Annotated[Holder, Field(description="Where.")]),
            {"description": "Where."},
            {"town": {"name": "Bern"}},
            "Holder(town=Town(name='Bern'))",
            {"town": {"name": 4}},
            "Expected `str`, got `int`",
        ),
        (make(int | Annotated[str, Field(max_length=2)]), {}, "ab", "'ab'", "abc", "length <= 2"),
        (make(Annotated[str, None, threading]), TEXT, "ab", "'ab'", 4, "Expected `str`"),
        (make(Annotated[str, Note()]), {"description": "From another annotation."}, "ab", "'ab'", 4, ""),
        (make(Annotated[int, "Some.", Field(ge=1, description="Last.")]), {"description": "Last."}, 1, "1", 0, ""),
        (
            make(Annotated[int, Field(examples=[4], json_schema_extra={"x": 1})]),
            {"description": "From the docstring. (examples: [4], x: 1)"},
            1,
            "1",
            0,
            "",
        ),
        (
            make(Pair[str]),
            {},
            {"first": "a", "second": 1},
            "Pair(first='a', second=1)",
            {"first": "", "second": 0},
            "second",
        ),
        (
            make(Ranked[str]),
            {},
            {"value": "a", "rank": 1},
            "Ranked(value='a', rank=2)",
            {"value": 1, "rank": 1},
            "value",
        ),
        (make(Listing[int]), {}, {"rows": [1], "size": 1}, "{'rows': [1], 'size': 1}", {"rows": [], "size": 0}, "size"),
        (make(pydantic.Secret[int]), {"type": "integer"}, 4, "Secret('**********')", "a", "valid integer"),
        (make(list[Amount]), {}, [1], "[1]", [0], "greater than or equal to 1"),
        (make(Few[int]), {}, [1, 2], "[1, 2]", [1, 2, 3], "at most 2 items"),
        (make(Percent), {"type": "integer", "maximum": 100}, 100, "100", 101, "less than or equal to 100"),
        (make(Discount), {}, {"percent": 5}, "Discount(percent=5)", {"percent": 101}, "percent: Input"),
        (make(Options), {}, {"level": 3}, "{'level': 3}", {"level": 4}, "level: Input should be less"),
        (
            make(Annotated[list[Town], Field(min_length=1)]),
            {},
            [{"name": "Bern"}],
            "[Town(name='Bern')]",
            [],
            "length >= 1",
        ),
    ],
)
async def test_parameter_has_the_schema_and_the_validation_of_pydantic(
    made: CallableTool[..., Any], schema: dict[str, Any], good: Any, shown: str, bad: Any, reason: str
) -> None:
    described = made.parameters["properties"]["value"]
    if schema:
        expected = {"description": "From the docstring."} | schema
        assert {name: described.get(name) for name in expected} == expected
    assert is_strict(made.parameters)
    assert await invoke(made, value=good) == shown
    if not reason:
        return
    with pytest.raises(msgspec.ValidationError, match=reason) as raised:
        await invoke(made, value=bad)
    assert "errors.pydantic.dev" not in str(raised.value)


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (make(int, Field(default=3, ge=1)), "3"),
        (make(Annotated[int, Field(default=3)]), "3"),
        (make(Annotated[int, Field(default=3)], 4), "4"),
        (make(Annotated[int, Field(ge=1)], 4), "4"),
        (make(Annotated[int, Field(ge=1)], Field(4)), "4"),
        (make(list[Town], Field(default_factory=list, max_length=3)), "[]"),
        (make(str | None, Field(None, description="A name.")), "None"),
        (make(Address | None, None), "None"),
    ],
)
async def test_default_of_a_field_is_passed_to_the_function(made: CallableTool[..., Any], shown: str) -> None:
    assert [await invoke(made), await invoke(made, value=None)] == [shown, shown]
    assert is_strict(made.parameters)


async def test_every_call_gets_a_new_default_of_a_factory() -> None:
    @tool
    def collect(names: Annotated[list[str], Field(default_factory=list)]) -> int:
        """Collect names."""
        names.append("Ada")
        return len(names)

    assert [(await collect.invoke("{}", CONTEXT)).output for _ in range(2)] == ["1", "1"]


def test_field_without_strict_mode_has_its_schema() -> None:
    def count(amount: int = Field(default=3, ge=1, description="How many.")) -> int:
        """Count."""
        return amount

    made = tool(strict=False)(count)
    assert made.parameters["properties"] == {"amount": {"type": "integer", "minimum": 1, "description": "How many."}}
    assert made.parameters["required"] == []


@pytest.mark.parametrize(
    ("kind", "field", "reason"),
    [
        (int, Field(default_factory=lambda data: 1), "show.value: a default_factory with an argument is not supported"),
        (
            Annotated[Town, AfterValidator(len)],
            None,
            "show.value: pydantic validates this type, and does not support 'Town'",
        ),
        (Annotated[list[Holder], AfterValidator(len)], None, "does not support 'Town'"),
        (Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], AfterValidator(len)], None, "does not support 'Meta'"),
        (Measured, None, "show.value: pydantic validates this type, and does not support 'Meta'"),
        (
            Annotated[threading.Event, Field(description="x")],
            None,
            "show.value: pydantic cannot describe this type: Unable to generate",
        ),
        (Annotated[str, Field(pattern="(")], None, r"show.value: pydantic cannot describe this type: .*\w"),
        (
            Annotated[int, Field(gt=1.5)],
            None,
            "pydantic cannot describe this type: ValueError: 'gt' must be coercible to an integer",
        ),
    ],
)
def test_unsuitable_field_is_rejected_with_its_path(kind: Any, field: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(kind, *([] if field is None else [field]))


def test_model_whose_types_are_not_defined_is_rejected_without_links() -> None:
    model = pydantic.create_model("Incomplete", part=("Missing", ...))
    with pytest.raises(ConfigError) as raised:
        make(model)
    assert raised.value.message == (
        "show: the type 'Incomplete' has no JSON form: `Incomplete` is not fully defined; "
        "you should define `Missing`, then call `Incomplete.model_rebuild()`"
    )


async def test_values_of_pydantic_types_are_encoded_as_results() -> None:
    @tool
    def give() -> Any:
        """Give something."""
        return [pydantic.HttpUrl("https://example.com/a"), Order(1, "kg")]

    assert (await give.invoke("{}", CONTEXT)).output == '["https://example.com/a",{"amount":1,"unit":"kg"}]'


def test_typed_dict_keeps_its_docstring_and_its_configuration() -> None:
    json_type = JsonType(Box, where="box")
    assert json_type.schema["description"] == "A box."
    with pytest.raises(msgspec.ValidationError, match="depth: Extra inputs are not permitted"):
        json_type.convert({"width": 1, "inner": None, "depth": 1})


async def test_encoder_of_a_type_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Name:
        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
            return pydantic_core.core_schema.any_schema(serialization=pydantic_core.core_schema.to_string_ser_schema())

        def __str__(self) -> str:
            return "Ada"

    make_adapter = mock.Mock(side_effect=pydantic.TypeAdapter)
    monkeypatch.setattr(pydantic, "TypeAdapter", make_adapter)
    assert make_result([Name(), Name()]).output == '["Ada","Ada"]'
    assert make_adapter.call_count == 1


def test_output_type_has_annotations_of_pydantic() -> None:
    json_type = JsonType(Order, where="o")
    assert json_type.convert({"amount": 2, "unit": None}) == Order(2, "piece")
    assert json_type.schema["properties"]["amount"] == {"type": "integer", "minimum": 1}
    with pytest.raises(msgspec.ValidationError, match="amount: Input should be greater than or equal to 1"):
        json_type.convert({"amount": 0})


def test_fields_of_types_that_contain_each_other_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"Node{number}" for number in range(6)]
    fields: list[Any] = [(name.lower(), f"{name} | None", None) for name in names]
    for name in names:
        node = dataclasses.make_dataclass(name, fields, namespace={"__module__": __name__})
        monkeypatch.setitem(globals(), name, node)
    get_type_hints = mock.Mock(side_effect=typing.get_type_hints)
    monkeypatch.setattr(typing, "get_type_hints", get_type_hints)
    JsonType(globals()["Node0"], where="node")
    assert get_type_hints.call_count == len(names)


@pytest.mark.parametrize(
    ("imported", "annotation", "schema", "has_pydantic"),
    [
        ("sys", "'A number.'", {"type": "integer", "description": "A number."}, False),
        ("pydantic", "'A number.'", {"type": "integer", "description": "A number."}, True),
        ("annotated_types", "annotated_types.Ge(3)", {"type": "integer", "minimum": 3}, False),
        ("annotated_types", "annotated_types.Predicate(bool)", {"type": "integer"}, True),
    ],
)
def test_pydantic_is_imported_only_if_a_type_needs_it(
    imported: str, annotation: str, schema: dict[str, Any], has_pydantic: bool
) -> None:
    program = f"""
import sys
import {imported}
from typing import Annotated
from antiphon import tool

@tool
def add(one: Annotated[int, {annotation}], other: int | None = None) -> int:
    "Add two numbers."
    return one + (other or 0)

print((add.parameters["properties"]["one"], "pydantic" in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == (schema, has_pydantic)


def test_class_with_the_methods_of_a_model_needs_no_pydantic() -> None:
    program = """
from antiphon.tools.schema import JsonType

class Even:
    @classmethod
    def model_json_schema(cls):
        return {"type": "integer"}

    @classmethod
    def model_validate_json(cls, data):
        raise ValueError("it is odd")

try:
    JsonType(Even, where="even").convert(3)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "it is odd\n"
