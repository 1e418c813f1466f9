"""The grammar of a turn's output, in llguidance's dialect of Lark."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from antiphon.backends.embedded.schema import JsonSchema, translate_schema
from antiphon.config.settings import GrammarLimits
from antiphon.errors import UnsupportedTool
from antiphon.grammars.schema_check import SchemaCheck, count_values
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.tools import (
    AllowedToolsChoice,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    GrammarInput,
    NamespaceTool,
    Tool,
)
from antiphon.protocol.unions import Unknown

# The call format that many models were trained on. Others learn it from the prompt.
CALL_OPENING = "<tool_call>"
CALL_NAME = CALL_OPENING + '\n{"name": '
CALL_ARGUMENTS = ', "arguments": '
# The input of a custom tool is not JSON. It follows unquoted, on its own lines.
CALL_INPUT = "}\n"
CALL_END = "</tool_call>"
CALL_CLOSING = "\n" + CALL_END

_T = TypeVar("_T")

_MAX_CALLS = 8
# Reading more JSON values than this takes longer than a few milliseconds.
_MAX_VALUES_ON_LOOP = 1000
_UNESCAPED_SLASH = re.compile(r"((?<!\\)(?:\\\\)*)/")
_HEADER = "%llguidance {}\n"
_NO_ARGUMENTS: JsonSchema = {"type": "object", "properties": {}, "additionalProperties": False}


class OutputRules(Struct, frozen=True, kw_only=True):
    """The output that a request allows.

    `tools` and `custom_tools` map the names of callable tools to the param paths of their constraints. `schemas` and
    `grammars` (in Lark) hold the constraints by param path. A custom tool that accepts any text has no grammar.
    `answer` is the param path of the answer's schema. `is_simple`: the grammar is known to compile in milliseconds.
    """

    may_answer: bool
    max_calls: int
    tools: dict[str, str]
    custom_tools: dict[str, str]
    schemas: dict[str, JsonSchema]
    grammars: dict[str, str]
    answer: str | None
    is_simple: bool = True

    @property
    def may_call(self) -> bool:
        return bool(self.tools or self.custom_tools)

    @property
    def open_ended(self) -> set[str]:
        """The custom tools with a grammar. Their calls end with the output: the input may contain the end marker."""
        return {name for name, path in self.custom_tools.items() if path in self.grammars}


async def check_schemas(request: CreateRequest, limits: GrammarLimits) -> None:
    """Raise InvalidRequest if a schema of the request is malformed or exceeds the limits."""
    schemas = list(_list_schemas(request))
    if schemas:
        await _run_off_loop(lambda: _check_all(schemas, limits), schemas)


async def load_rules(request: CreateRequest, limits: GrammarLimits) -> OutputRules:
    """Call `read_rules`, in a thread if the request has large schemas."""
    return await _run_off_loop(lambda: read_rules(request, limits), _list_schemas(request))


async def _run_off_loop(function: Callable[[], _T], schemas: Iterable[tuple[str, Any]]) -> _T:
    """Call a function that reads schemas: here if they are small, else in a thread."""
    room = _MAX_VALUES_ON_LOOP
    for _, schema in schemas:
        room -= count_values(schema, room)
        if room < 0:
            return await asyncio.to_thread(function)
    return function()


def _check_all(schemas: Iterable[tuple[str, JsonSchema]], limits: GrammarLimits) -> None:
    check = SchemaCheck(limits)
    for path, schema in schemas:
        check.check(schema, path)


def _list_schemas(request: CreateRequest) -> Iterator[tuple[str, JsonSchema]]:
    """Yield the schemas of the request with their param paths."""
    for path, tools in _list_tool_lists(request):
        for index, tool in enumerate(tools):
            if isinstance(tool, FunctionTool) and tool.parameters:
                yield f"{path}[{index}].parameters", tool.parameters
    text_format = request.text.format if request.text is not None else None
    if isinstance(text_format, JsonSchemaFormat) and text_format.schema:
        yield "text.format.schema", text_format.schema


def _list_tool_lists(request: CreateRequest) -> Iterator[tuple[str, Sequence[Tool | Unknown]]]:
    """Yield the lists of tools with their param paths: the request's, and those of its namespaces."""
    tools = request.tools or ()
    yield "tools", tools
    for index, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            yield f"tools[{index}].tools", tool.tools


def read_rules(request: CreateRequest, limits: GrammarLimits | None = None) -> OutputRules:
    """Read the request's tools, tool_choice and text.format. Raises if a grammar cannot express them."""
    limits = limits or GrammarLimits()
    check = SchemaCheck(limits)
    callable_names, may_answer = _read_choice(request)
    schemas: dict[str, JsonSchema] = {}
    grammars: dict[str, str] = {}
    tools: dict[str, str] = {}
    custom_tools: dict[str, str] = {}
    for index, tool in enumerate(request.tools or ()):
        if not isinstance(tool, FunctionTool | CustomTool):
            raise UnsupportedTool(
                f"The embedded model cannot call tools of type '{tool.type}'.", param=f"tools[{index}].type"
            )
        if tool.name not in callable_names:
            continue
        if isinstance(tool, FunctionTool):
            path = tools[tool.name] = f"tools[{index}].parameters"
            schemas[path] = translate_schema(_get_arguments_schema(tool), path, limits=limits, check=check)
        else:
            path = custom_tools[tool.name] = f"tools[{index}].format.definition"
            if isinstance(tool.format, GrammarInput):
                grammars[path] = _read_grammar(tool.format)
    answer = _read_format(request, schemas, limits, check) if may_answer else None
    single = request.parallel_tool_calls is False or isinstance(request.tool_choice, FunctionChoice | CustomChoice)
    return OutputRules(
        may_answer=may_answer,
        max_calls=(1 if single else _MAX_CALLS) if tools or custom_tools else 0,
        tools=tools,
        custom_tools=custom_tools,
        schemas=schemas,
        grammars=grammars,
        answer=answer,
        is_simple=check.is_simple and not grammars,
    )


def _read_choice(request: CreateRequest) -> tuple[set[str], bool]:
    """Return the names of the callable tools, and True if the model may answer with text instead."""
    names = {tool.name for tool in request.tools or () if isinstance(tool, FunctionTool | CustomTool)}
    choice = request.tool_choice
    if isinstance(choice, FunctionChoice | CustomChoice):
        return names & {choice.name}, False
    mode: Any = choice
    if isinstance(choice, AllowedToolsChoice):
        names &= {str(tool.get("name")) for tool in choice.tools}
        mode = choice.mode
    if mode == "none":
        names = set()
    return names, mode != "required"


def _read_grammar(grammar: GrammarInput) -> str:
    """Return the grammar in Lark. A regular expression becomes a grammar with one rule."""
    if grammar.syntax == "lark":
        return grammar.definition
    # Lark's /.../ cannot contain a slash or a line break, and // starts a comment.
    pattern = _UNESCAPED_SLASH.sub(r"\1\/", grammar.definition).replace("\n", r"\n")
    return f"start: /(?:{pattern})/"


def _get_arguments_schema(tool: FunctionTool) -> JsonSchema:
    schema = tool.parameters or _NO_ARGUMENTS
    # Without named properties, no arguments are best: a small model would invent some.
    empty = set(schema) <= {"type", "properties", "required"} and not schema.get("properties")
    return _NO_ARGUMENTS if empty else schema


def _read_format(
    request: CreateRequest, schemas: dict[str, JsonSchema], limits: GrammarLimits, check: SchemaCheck
) -> str | None:
    """Add the answer's schema to `schemas` and return its param path; None for free text."""
    text_format = request.text.format if request.text is not None else None
    if isinstance(text_format, JsonSchemaFormat):
        path = "text.format.schema"
        schemas[path] = translate_schema(text_format.schema or {}, path, limits=limits, check=check)
    elif isinstance(text_format, JsonObjectFormat):
        path = "text.format"
        schemas[path] = translate_schema({"type": "object"}, path)
    else:
        return None
    return path


def build_grammar(rules: OutputRules, *, forbid_calls: bool) -> str | None:
    """Return the grammar of a turn; None if any output is allowed. With `forbid_calls`, an answer cannot be a call."""
    if not rules.may_call and rules.answer is None and not forbid_calls:
        return None
    lines: list[str] = []
    alternatives: list[str] = []
    if rules.may_answer:
        alternatives.append("answer")
        lines += _write_answer_rules(rules)
    if rules.may_call:
        alternatives.append("calls")
        lines += _write_call_rules(rules)
    return _HEADER + "\n".join([f"start: ({' | '.join(alternatives)})", *lines]) + "\n"


def build_schema_grammar(schema: JsonSchema) -> str:
    """Return a grammar of one schema, to find the one that does not compile."""
    return f"{_HEADER}start: answer\nanswer: %json {json.dumps(schema)}\n"


def build_input_grammar(grammar: str) -> str:
    """Return a grammar of one custom tool's input, to find the one that does not compile."""
    return f"{_HEADER}start: input\ninput: {_nest(grammar)}\n"


def _nest(grammar: str) -> str:
    return f"%lark {{\n{grammar}\n}}"


def _write_answer_rules(rules: OutputRules) -> list[str]:
    if rules.answer is not None:
        return [f"answer: %json {json.dumps(rules.schemas[rules.answer])}"]
    return ["answer: TEXT", rf"TEXT: /(.|\n)+/ & ~/{CALL_OPENING}(.|\n)*/"]


def _write_call_rules(rules: OutputRules) -> list[str]:
    open_ended = [name for name in rules.custom_tools if name in rules.open_ended]
    closed = [*rules.tools, *(name for name in rules.custom_tools if name not in open_ended)]
    lines: list[str] = []
    names = {name: f"call_{index}" for index, name in enumerate([*closed, *open_ended])}
    for name, rule in names.items():
        lines += (
            _write_function_rules(name, rule, rules) if name in rules.tools else _write_custom_rules(name, rule, rules)
        )
    more = rules.max_calls - 1
    alternatives: list[str] = []
    if closed:
        lines.append(f"closed: {' | '.join(names[name] for name in closed)}")
        alternatives.append('closed ("\\n" closed)' + f"{{0,{more}}}" if more else "closed")
    if open_ended:
        lines.append(f"open: {' | '.join(names[name] for name in open_ended)}")
        alternatives.append('(closed "\\n")' + f"{{0,{more}}} open" if closed and more else "open")
    return [f"calls: {' | '.join(alternatives)}", *lines]


def _write_function_rules(name: str, rule: str, rules: OutputRules) -> list[str]:
    start = json.dumps(CALL_NAME + json.dumps(name) + CALL_ARGUMENTS)
    return [
        f"{rule}: {start} {rule}_arguments {json.dumps('}' + CALL_CLOSING)}",
        f"{rule}_arguments: %json {json.dumps(rules.schemas[rules.tools[name]])}",
    ]


def _write_custom_rules(name: str, rule: str, rules: OutputRules) -> list[str]:
    start = json.dumps(CALL_NAME + json.dumps(name) + CALL_INPUT)
    grammar = rules.grammars.get(rules.custom_tools[name])
    free = rf"{rule}_input[suffix={json.dumps(CALL_END)}]: /(.|\n)*/"
    return [
        f"{rule}: {start} {rule}_input",
        free if grammar is None else f"{rule}_input: {_nest(grammar)}",
    ]
