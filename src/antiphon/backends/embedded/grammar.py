"""What the model may say in a turn, as one grammar in llguidance's dialect of Lark."""

import json
from typing import Any

from msgspec import Struct

from antiphon.backends.embedded.schema import JsonSchema, fit_schema
from antiphon.errors import UnsupportedTool
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.tools import AllowedToolsChoice, FunctionChoice, FunctionTool

# The signs many models were trained on; any model can be shown them.
CALL_OPENING = "<tool_call>"
CALL_NAME = CALL_OPENING + '\n{"name": '
CALL_ARGUMENTS = ', "arguments": '
CALL_CLOSING = "\n</tool_call>"

_MOST_CALLS = 8
_HEADER = "%llguidance {}\n"
_NO_ARGUMENTS: JsonSchema = {"type": "object", "properties": {}, "additionalProperties": False}


class Rules(Struct, frozen=True, kw_only=True):
    """What a request lets the model do. `schemas` are the constraints by the place in the request they come from."""

    may_answer: bool
    most_calls: int
    tools: dict[str, str]
    schemas: dict[str, JsonSchema]
    answer: str | None


def read_rules(request: CreateRequest) -> Rules:
    """The request's tools, tool_choice and text.format. Raises on what cannot be made into a grammar."""
    callable_names, may_answer = _read_choice(request)
    schemas: dict[str, JsonSchema] = {}
    tools: dict[str, str] = {}
    for index, tool in enumerate(request.tools or ()):
        if not isinstance(tool, FunctionTool):
            raise UnsupportedTool(
                f"The embedded model cannot call tools of type '{tool.type}'.", param=f"tools[{index}].type"
            )
        if tool.name in callable_names:
            place = tools[tool.name] = f"tools[{index}].parameters"
            schemas[place] = fit_schema(_arguments_of(tool), place)
    answer = _read_format(request, schemas) if may_answer else None
    single = request.parallel_tool_calls is False or isinstance(request.tool_choice, FunctionChoice)
    most_calls = (1 if single else _MOST_CALLS) if tools else 0
    return Rules(may_answer=may_answer, most_calls=most_calls, tools=tools, schemas=schemas, answer=answer)


def _read_choice(request: CreateRequest) -> tuple[set[str], bool]:
    """The names of the tools that may be called, and whether the model may answer instead."""
    names = {tool.name for tool in request.tools or () if isinstance(tool, FunctionTool)}
    choice = request.tool_choice
    if isinstance(choice, FunctionChoice):
        return names & {choice.name}, False
    mode: Any = choice
    if isinstance(choice, AllowedToolsChoice):
        names &= {str(tool.get("name")) for tool in choice.tools}
        mode = choice.mode
    if mode == "none":
        names = set()
    return names, mode != "required"


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
    if not rules.tools and rules.answer is None and not guarded:
        return None
    lines: list[str] = []
    ways: list[str] = []
    if rules.may_answer:
        ways.append("answer")
        lines += _rules_of_answer(rules)
    if rules.tools:
        ways.append("calls")
        lines += _rules_of_calls(rules)
    return _HEADER + "\n".join([f"start: ({' | '.join(ways)})", *lines]) + "\n"


def schema_grammar(schema: JsonSchema) -> str:
    """A grammar of one schema alone, to find out which one of several is at fault."""
    return f"{_HEADER}start: answer\nanswer: %json {json.dumps(schema)}\n"


def _rules_of_answer(rules: Rules) -> list[str]:
    if rules.answer is not None:
        return [f"answer: %json {json.dumps(rules.schemas[rules.answer])}"]
    return ["answer: TEXT", rf"TEXT: /(.|\n)+/ & ~/{CALL_OPENING}(.|\n)*/"]


def _rules_of_calls(rules: Rules) -> list[str]:
    more = f' ("\\n" call){{0,{rules.most_calls - 1}}}' if rules.most_calls > 1 else ""
    names = [f"call_{index}" for index in range(len(rules.tools))]
    lines = [f"calls: call{more}", f"call: {' | '.join(names)}"]
    for index, (name, place) in enumerate(rules.tools.items()):
        opening = json.dumps(CALL_NAME + json.dumps(name) + CALL_ARGUMENTS)
        lines.append(f"call_{index}: {opening} arguments_{index} {json.dumps('}' + CALL_CLOSING)}")
        lines.append(f"arguments_{index}: %json {json.dumps(rules.schemas[place])}")
    return lines
