"""What the model may say in a turn, as one grammar in llguidance's dialect of Lark."""

import json
import re
from typing import Any

from msgspec import Struct

from antiphon.backends.embedded.schema import JsonSchema, fit_schema
from antiphon.errors import UnsupportedTool
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.tools import (
    AllowedToolsChoice,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    GrammarInput,
)

# The signs many models were trained on; any model can be shown them.
CALL_OPENING = "<tool_call>"
CALL_NAME = CALL_OPENING + '\n{"name": '
CALL_ARGUMENTS = ', "arguments": '
# The input of a custom tool is no JSON: it follows as it is, on lines of its own.
CALL_INPUT = "}\n"
CALL_END = "</tool_call>"
CALL_CLOSING = "\n" + CALL_END

_MOST_CALLS = 8
_UNESCAPED_SLASH = re.compile(r"((?<!\\)(?:\\\\)*)/")
_HEADER = "%llguidance {}\n"
_NO_ARGUMENTS: JsonSchema = {"type": "object", "properties": {}, "additionalProperties": False}


class Rules(Struct, frozen=True, kw_only=True):
    """What a request lets the model do. `schemas` are the constraints by the place in the request they come from.

    `tools` gives that place for every function by its name. `inputs` are the custom tools; `grammars` has what the
    input of one must match, in Lark, by its place, and nothing for those that take any text.
    """

    may_answer: bool
    most_calls: int
    tools: dict[str, str]
    inputs: dict[str, str]
    schemas: dict[str, JsonSchema]
    grammars: dict[str, str]
    answer: str | None

    @property
    def may_call(self) -> bool:
        return bool(self.tools or self.inputs)

    @property
    def open_ended(self) -> set[str]:
        """The tools whose calls nothing but the end of the answer ends: any sign could be a part of their input."""
        return {name for name, place in self.inputs.items() if place in self.grammars}


def read_rules(request: CreateRequest) -> Rules:
    """The request's tools, tool_choice and text.format. Raises on what cannot be made into a grammar."""
    callable_names, may_answer = _read_choice(request)
    schemas: dict[str, JsonSchema] = {}
    grammars: dict[str, str] = {}
    tools: dict[str, str] = {}
    inputs: dict[str, str] = {}
    for index, tool in enumerate(request.tools or ()):
        if not isinstance(tool, FunctionTool | CustomTool):
            raise UnsupportedTool(
                f"The embedded model cannot call tools of type '{tool.type}'.", param=f"tools[{index}].type"
            )
        if tool.name not in callable_names:
            continue
        if isinstance(tool, FunctionTool):
            place = tools[tool.name] = f"tools[{index}].parameters"
            schemas[place] = fit_schema(_arguments_of(tool), place)
        else:
            place = inputs[tool.name] = f"tools[{index}].format.definition"
            if isinstance(tool.format, GrammarInput):
                grammars[place] = _read_grammar(tool.format)
    answer = _read_format(request, schemas) if may_answer else None
    single = request.parallel_tool_calls is False or isinstance(request.tool_choice, FunctionChoice | CustomChoice)
    return Rules(
        may_answer=may_answer,
        most_calls=(1 if single else _MOST_CALLS) if tools or inputs else 0,
        tools=tools,
        inputs=inputs,
        schemas=schemas,
        grammars=grammars,
        answer=answer,
    )


def _read_choice(request: CreateRequest) -> tuple[set[str], bool]:
    """The names of the tools that may be called, and whether the model may answer instead."""
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


def _read_grammar(asked: GrammarInput) -> str:
    """A grammar in Lark. A regular expression becomes one of a single rule."""
    if asked.syntax == "lark":
        return asked.definition
    # Between slashes there is neither a slash nor the end of a line; and // would begin a remark.
    pattern = _UNESCAPED_SLASH.sub(r"\1\/", asked.definition).replace("\n", r"\n")
    return f"start: /(?:{pattern})/"


def _arguments_of(tool: FunctionTool) -> JsonSchema:
    schema = tool.parameters or _NO_ARGUMENTS
    # Where nothing is asked for, saying nothing is right, and better than what a small model would make up.
    empty = set(schema) <= {"type", "properties", "required"} and not schema.get("properties")
    return _NO_ARGUMENTS if empty else schema


def _read_format(request: CreateRequest, schemas: dict[str, JsonSchema]) -> str | None:
    """Adds the schema of the answer, and gives its place."""
    asked = request.text.format if request.text is not None else None
    if isinstance(asked, JsonSchemaFormat):
        place = "text.format.schema"
        schemas[place] = fit_schema(asked.schema or {}, place)
    elif isinstance(asked, JsonObjectFormat):
        place = "text.format"
        schemas[place] = fit_schema({"type": "object"}, place)
    else:
        return None
    return place


def build_grammar(rules: Rules, *, guarded: bool) -> str | None:
    """The grammar for a turn, or None where the model is free. A `guarded` answer cannot look like a call."""
    if not rules.may_call and rules.answer is None and not guarded:
        return None
    lines: list[str] = []
    ways: list[str] = []
    if rules.may_answer:
        ways.append("answer")
        lines += _rules_of_answer(rules)
    if rules.may_call:
        ways.append("calls")
        lines += _rules_of_calls(rules)
    return _HEADER + "\n".join([f"start: ({' | '.join(ways)})", *lines]) + "\n"


def schema_grammar(schema: JsonSchema) -> str:
    """A grammar of one schema alone, to find out which one of several is at fault."""
    return f"{_HEADER}start: answer\nanswer: %json {json.dumps(schema)}\n"


def input_grammar(grammar: str) -> str:
    """The same of the input of a custom tool."""
    return f"{_HEADER}start: input\ninput: {_nest(grammar)}\n"


def _nest(grammar: str) -> str:
    return f"%lark {{\n{grammar}\n}}"


def _rules_of_answer(rules: Rules) -> list[str]:
    if rules.answer is not None:
        return [f"answer: %json {json.dumps(rules.schemas[rules.answer])}"]
    return ["answer: TEXT", rf"TEXT: /(.|\n)+/ & ~/{CALL_OPENING}(.|\n)*/"]


def _rules_of_calls(rules: Rules) -> list[str]:
    open_ended = [name for name in rules.inputs if name in rules.open_ended]
    closed = [*rules.tools, *(name for name in rules.inputs if name not in open_ended)]
    lines: list[str] = []
    names = {name: f"call_{index}" for index, name in enumerate([*closed, *open_ended])}
    for name, rule in names.items():
        lines += _rules_of_function(name, rule, rules) if name in rules.tools else _rules_of_input(name, rule, rules)
    more = rules.most_calls - 1
    ways: list[str] = []
    if closed:
        lines.append(f"closed: {' | '.join(names[name] for name in closed)}")
        ways.append('closed ("\\n" closed)' + f"{{0,{more}}}" if more else "closed")
    if open_ended:
        lines.append(f"open: {' | '.join(names[name] for name in open_ended)}")
        ways.append('(closed "\\n")' + f"{{0,{more}}} open" if closed and more else "open")
    return [f"calls: {' | '.join(ways)}", *lines]


def _rules_of_function(name: str, rule: str, rules: Rules) -> list[str]:
    opening = json.dumps(CALL_NAME + json.dumps(name) + CALL_ARGUMENTS)
    return [
        f"{rule}: {opening} {rule}_arguments {json.dumps('}' + CALL_CLOSING)}",
        f"{rule}_arguments: %json {json.dumps(rules.schemas[rules.tools[name]])}",
    ]


def _rules_of_input(name: str, rule: str, rules: Rules) -> list[str]:
    opening = json.dumps(CALL_NAME + json.dumps(name) + CALL_INPUT)
    grammar = rules.grammars.get(rules.inputs[name])
    free = rf"{rule}_input[suffix={json.dumps(CALL_END)}]: /(.|\n)*/"
    return [
        f"{rule}: {opening} {rule}_input",
        free if grammar is None else f"{rule}_input: {_nest(grammar)}",
    ]
