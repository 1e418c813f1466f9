"""`@tool`: schemas, arguments and results of functions."""

import asyncio
import dataclasses
import enum
import functools
import json
import math
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pydantic
import pytest
from jsonschema import Draft202012Validator

from antiphon.errors import ConfigError
from antiphon.tools.base import RunContext, Tool, ToolContext, ToolResult
from antiphon.tools.function import tool

CONTEXT = ToolContext(run_id="run_1", call_id="call_1", idempotency_key="key_1")


class Name(str):
    """A text, as HTML parsers return it."""


class Ratio(float):
    """A number, as NumPy returns it."""


class Count(int):
    pass


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@dataclasses.dataclass
class Town:
    city: str
    country: str = "CH"


class Stop(msgspec.Struct):
    town: Town
    nights: int


class Rating(pydantic.BaseModel):
    stars: int = pydantic.Field(ge=1, le=5, description="How good.")
    note: str | None = None


class Options(TypedDict):
    fast: bool


@tool
async def plan(
    stops: list[Stop],
    rating: Rating,
    unit: Unit,
    mode: Literal["walk", "train"],
    budget: Annotated[int, "In francs."],
    options: Options,
    limit: Annotated[int, msgspec.Meta(ge=1)] = 3,
    title: str | None = None,
) -> dict[str, Any]:
    """Plan a journey.

    The longer, the better.

    Args:
        stops: Where to stop,
            in order.
        mode (str): How to get there.
    """
    return {
        "nights": [stop.nights for stop in stops],
        "country": stops[0].town.country,
        "stars": rating.stars,
        "unit": unit.name,
        "rest": [mode, budget, options, limit, title],
    }


ARGUMENTS: dict[str, Any] = {
    "stops": [{"town": {"city": "Bern", "country": None}, "nights": 2}],
    "rating": {"stars": 4, "note": None},
    "unit": "kelvin",
    "mode": "walk",
    "budget": 9,
    "options": {"fast": True},
    "limit": None,
    "title": None,
}


def is_strict(schema: Any) -> bool:
    if isinstance(schema, list):
        return all(map(is_strict, schema))
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object" and "properties" in schema:
        closed = schema.get("additionalProperties") is False
        if not closed or schema.get("required") != list(schema["properties"]):
            return False
    return "default" not in schema and all(map(is_strict, schema.values()))


def test_signature_becomes_a_strict_schema() -> None:
    schema = dict(plan.parameters)
    assert is_strict(schema)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(ARGUMENTS)
    properties = schema["properties"]
    assert properties["stops"]["description"] == "Where to stop, in order."
    assert properties["mode"] == {
        "type": "string",
        "enum": ["train", "walk"],
        "description": "How to get there.",
    }
    assert properties["budget"] == {"type": "integer", "description": "In francs."}
    assert properties["limit"] == {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}
    assert plan.describe() == {
        "type": "function",
        "name": "plan",
        "description": "Plan a journey.\n\nThe longer, the better.",
        "parameters": schema,
        "strict": True,
    }


async def test_function_gets_decoded_types_and_defaults() -> None:
    arguments = {**ARGUMENTS, "stops": [{"town": {"city": "Bern", "country": "IT"}, "nights": 2}]}
    result = await plan.invoke(msgspec.json.encode(arguments).decode(), CONTEXT)
    assert msgspec.json.decode(result.output) == {
        "nights": [2],
        "country": "IT",
        "stars": 4,
        "unit": "KELVIN",
        "rest": ["walk", 9, {"fast": True}, 3, None],
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"budget": "much"}, "budget"),
        ({"mode": "fly"}, "mode"),
        ({"rating": {"stars": 9}}, "stars"),
        ({"other": 1}, "other"),
        ({"stops": None}, "stops"),
    ],
)
async def test_invalid_arguments_are_rejected_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=reason):
        await plan.invoke(msgspec.json.encode(ARGUMENTS | change).decode(), CONTEXT)


async def test_sync_function_runs_in_a_thread_with_its_context() -> None:
    @tool(name="who", timeout=3, retries=1, needs_approval=True, on_interrupt="retry")
    def who(context: ToolContext, greeting: str = "hi") -> str:
        """Say who is there."""
        assert threading.current_thread() is not threading.main_thread()
        return f"{greeting} {context.idempotency_key}"

    assert (await who.invoke("{}", CONTEXT)).output == "hi key_1"
    assert (await who.invoke("", CONTEXT)).output == "hi key_1"
    assert list(who.parameters["properties"]) == ["greeting"]
    assert (who.timeout, who.retries, who.needs_approval, who.on_interrupt) == (3, 1, True, "retry")


@pytest.mark.parametrize(
    ("returned", "output"),
    [
        ("text", "text"),
        (None, "null"),
        ({"a": 1}, '{"a":1}'),
        (Town("Bern"), '{"city":"Bern","country":"CH"}'),
        (Rating(stars=3), '{"stars":3,"note":null}'),
        ([Rating(stars=3)], '[{"stars":3,"note":null}]'),
        (ToolResult("broken", is_error=True), "broken"),
        (Name("Ada"), "Ada"),
        ([Name("Ada"), Ratio(0.5), Count(3)], '["Ada",0.5,3]'),
        (types.MappingProxyType({"path": Path("a/b")}), '{"path":"a/b"}'),
        ({"name": Name("Ada"), "ratio": math.nan}, '{"name":"Ada","ratio":"NaN"}'),
    ],
)
async def test_return_value_is_encoded_as_text(returned: Any, output: str) -> None:
    @tool
    async def give() -> Any:
        """Give something."""
        return returned

    assert (await give.invoke("{}", CONTEXT)).output == output


def without_types(city) -> str:  # type: ignore[no-untyped-def]
    """Look up."""
    return str(city)


def without_docstring(city: str) -> str:
    return city


def with_rest(*cities: str) -> str:
    """Look up."""
    return " ".join(cities)


def with_any_keys(filters: dict[str, str]) -> str:
    """Look up."""
    return str(filters)


def with_anything(value: Any) -> str:
    """Look up."""
    return str(value)


def with_a_lock(lock: threading.Event) -> str:
    """Look up."""
    return str(lock)


def in_parts(city: str) -> Iterator[str]:
    """Look up."""
    yield city


async def in_parts_later(city: str) -> AsyncIterator[str]:
    """Look up."""
    yield city


def with_unknown_type(value: "Unknown") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Look up."""
    return str(value)


class Archive:
    def find(self, words: str) -> str:
        """Look up."""
        return words


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (in_parts, "The tool 'in_parts' is a generator. Return one result"),
        (in_parts_later, "The tool 'in_parts_later' is a generator. Return one result"),
        (Archive.find, r"The parameter 'self' of the tool 'find' has no type. .*`tool\(instance.method\)`"),
        (without_types, "The parameter 'city' of the tool 'without_types' has no type."),
        (without_docstring, "The tool 'without_docstring' has no docstring"),
        (with_rest, r"The tool 'with_rest' cannot have the parameter '\*cities"),
        (with_any_keys, "with_any_keys.filters: strict mode cannot express an object with arbitrary keys"),
        (with_anything, "with_anything.value: strict mode needs a type"),
        (with_a_lock, "with_a_lock: .*Event"),
        (lambda: None, "Invalid tool name '<lambda>'"),
        (with_unknown_type, "cannot be evaluated: name 'Unknown' is not defined. Define or import it at the top"),
        (int, "The function of the tool 'int' has no signature. Wrap it in a function with types."),
        ("look_up", r"@tool: expected a function, got 'look_up'. Options are named: @tool\(name=...\)."),
    ],
)
def test_unsuitable_function_is_rejected_with_the_reason(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tool(function)


def test_arbitrary_keys_are_allowed_without_strict_mode() -> None:
    made = tool(strict=False)(with_any_keys)
    assert isinstance(made, Tool)
    assert made.strict is False
    assert made.parameters["properties"]["filters"] == {
        "type": "object",
        "additionalProperties": {"type": "string"},
    }


async def test_cancelling_a_call_cancels_the_function() -> None:
    begun = asyncio.Event()

    @tool
    async def wait() -> None:
        """Wait."""
        begun.set()
        await asyncio.Event().wait()

    calling = asyncio.ensure_future(wait.invoke("{}", CONTEXT))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


class Search:
    """Search the archive."""

    async def __call__(self, words: str) -> str:
        return f"found {words}"


def add(one: int, other: int) -> int:
    """Add two numbers."""
    return one + other


@pytest.mark.parametrize(
    ("function", "name", "description", "arguments", "output"),
    [
        (functools.partial(add, other=2), "add", "Add two numbers.", {"one": 1}, "3"),
        (functools.partial(add, 2), "add", "Add two numbers.", {"other": 1}, "3"),
        (Search(), "Search", "Search the archive.", {"words": "it"}, "found it"),
    ],
)
async def test_partials_and_callable_objects_become_tools(
    function: Any, name: str, description: str, arguments: dict[str, Any], output: str
) -> None:
    made = tool(function)
    assert (made.name, made.description, list(made.parameters["properties"])) == (name, description, list(arguments))
    assert (await made.invoke(json.dumps(arguments), CONTEXT)).output == output


@pytest.mark.parametrize(
    "kind",
    [
        ToolContext | None,
        Annotated[ToolContext | None, "The call."],
        RunContext[dict[str, str]] | None,
        ToolContext[int],
    ],
)
async def test_optional_context_is_passed_and_not_in_the_schema(kind: Any) -> None:
    def who(name: str, context=None) -> str:  # type: ignore[no-untyped-def]
        """Say who is there."""
        return f"{name}: {context and context.run_id}"

    who.__annotations__["context"] = kind
    made = tool(who)
    assert list(made.parameters["properties"]) == ["name"]
    assert (await made.invoke('{"name": "Ada"}', CONTEXT)).output == "Ada: run_1"
    assert made("Ada") == "Ada: None"


def test_one_word_docstring_is_no_section_heading() -> None:
    @tool
    def raises() -> None:
        """Raises"""

    assert raises.description == "Raises"


async def test_every_parameter_for_the_context_gets_it() -> None:
    @tool
    def who(call: ToolContext, run: RunContext) -> bool:
        """Say who is there."""
        return call is run

    assert (await who.invoke("{}", CONTEXT)).output == "true"
