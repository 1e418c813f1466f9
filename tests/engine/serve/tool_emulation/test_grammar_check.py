"""Checks of the grammars of custom tools."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from antiphon.config.settings import GrammarLimits
from antiphon.engine.serve.tool_emulation.grammar_check import GrammarCheck
from antiphon.errors import InvalidRequest
from antiphon.protocol.hosted import AdditionalTools
from antiphon.protocol.items import Message
from antiphon.protocol.tools import CustomTool, FunctionTool, GrammarInput, NamespaceTool, Tool

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = GrammarLimits()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def check() -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(LIMITS)
    yield check
    await check.close()


def make_tool(definition: str, syntax: Any = "lark") -> CustomTool:
    return CustomTool("c", format=GrammarInput(definition, syntax))


async def refuse(check: GrammarCheck, *tools: Tool) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        await check.check_tools([*tools], project="p")
    assert caught.value.code in ("invalid_value", "unsupported_schema")
    return caught.value.param, caught.value.message


async def test_tools_without_faults_are_accepted(check: GrammarCheck) -> None:
    await check.check_tools([], project="p")
    await check.check_tools([FunctionTool("f"), CustomTool("c"), make_tool('start: "a" | /b+/ "c"{1,3}')], project="p")
    await check.check_tools([make_tool("[a-z]{1,20}", "regex")], project="p")
    await check.check_items(
        [Message("user", "hi"), AdditionalTools(role="developer", tools=[make_tool('start: "a"')])], project="p"
    )


@pytest.mark.parametrize(
    ("definition", "syntax", "fault"),
    [
        ("start: nothing", "lark", "unknown name"),
        ("([", "regex", "unclosed"),
        ("start: a\na: a | b\nb: a b", "lark", "no text matches it"),
        ("start: " + "(" * 9000, "lark", "nested"),
    ],
)
async def test_invalid_grammar_has_an_error(check: GrammarCheck, definition: str, syntax: str, fault: str) -> None:
    param, message = await refuse(check, FunctionTool("f"), make_tool(definition, syntax))
    assert (param, fault in message) == ("tools[1].format.definition", True)


async def test_faults_have_the_param_path_of_the_tool(check: GrammarCheck) -> None:
    bad = make_tool("start: nothing")
    param, _ = await refuse(check, NamespaceTool("n", "tools", [bad]))
    assert param == "tools[0].tools[0].format.definition"
    with pytest.raises(InvalidRequest) as caught:
        await check.check_items(
            [Message("user", "hi"), AdditionalTools(role="developer", tools=[FunctionTool("f"), bad])], project="p"
        )
    assert caught.value.param == "input[1].tools[1].format.definition"


@pytest.mark.parametrize(
    ("definition", "syntax", "setting"),
    [
        ("start: " + " | ".join(f'"{number}"' for number in range(10_000)), "lark", "definition_length"),
        ("start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(3000)) + 'r3000: "a"', "lark", "rules"),
        ('start: "a"{1000000000}', "lark", "items"),
        ('start: "a"{ 3, 1000000000 }', "lark", "items"),
        ('start: "a"{99999999999999999999999}', "lark", "items"),
        ('start: "a"~1000000000', "lark", "items"),
        ('start: "a" ~ 1..1000000000', "lark", "items"),
        ("start: /((a{100}){100}){100}/", "lark", "pattern_size"),
        ("start: A\nA: /b/ & /a{1000000}/", "lark", "pattern_size"),
        ("((a{100}){100}){100}", "regex", "pattern_size"),
    ],
)
async def test_grammar_over_a_limit_is_refused(check: GrammarCheck, definition: str, syntax: str, setting: str) -> None:
    param, message = await refuse(check, make_tool(definition, syntax))
    assert param == "tools[0].format.definition"
    assert f"The limit is {getattr(LIMITS, setting)} (setting grammars.{setting})." in message


async def test_schema_in_a_grammar_is_limited_too(check: GrammarCheck) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "array", "minItems": 10**9}}}
    definition = f"start: a // %json {{\na: %json {msgspec.json.encode(schema).decode()}\n"
    param, message = await refuse(check, make_tool(definition))
    assert param == "tools[0].format.definition.%json.properties.x.minItems"
    assert "setting grammars.items" in message


@pytest.mark.parametrize(
    "definition",
    [
        'start: "a{1000000000}" // {1000000000}',
        "start: /[{1000000000}]/",
        "start: /a/ # {1000000000}",
        'start: "a\\"{1000000000}"',
    ],
)
async def test_numbers_in_texts_and_comments_do_not_count(check: GrammarCheck, definition: str) -> None:
    await check.check_tools([make_tool(definition)], project="p")


async def test_intersected_patterns_are_refused_within_the_limit_of_time(check: GrammarCheck) -> None:
    parts = " & ".join(f"/(.|\\n)*{chr(97 + index % 26)}.{{{index}}}(.|\\n)*/" for index in range(39))
    param, _ = await refuse(check, make_tool(f"start: T\nT: {parts}"))
    assert param == "tools[0].format.definition"
