"""Translate a turn into the messages of a chat template: a system message, then user and assistant alternating."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from antiphon.backends.base import Turn
from antiphon.backends.embedded.grammar import CALL_ARGUMENTS, CALL_CLOSING, CALL_INPUT, CALL_NAME, OutputRules
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec, content, items
from antiphon.protocol.json_text import read_json
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.tools import CustomTool, FunctionTool, GrammarInput
from antiphon.protocol.unions import Unknown

TemplateMessage = dict[str, str]

_DEFAULT_INSTRUCTIONS = "You are a helpful assistant."
# Without examples, a model that was trained on tools calls one for every message, even for a greeting.
_WHEN_TO_CALL = (
    "Answer greetings, general questions and requests for texts yourself, in plain words. "
    "Only if the message asks for something that one of these tools does, call it:"
)
# Starts the output of the decision step if there are no examples. The model continues with a name or ends.
DECISION_QUESTION = 'The name of the tool that does what the message asks for, or "none" if no tool does it:'
_TEXT_PARTS = (content.InputText, content.OutputText, content.Text, content.SummaryText, content.ReasoningText)


# The families of models that were trained on tools, by the start of their names.
_TRAINED_ON_TOOLS = ("qwen",)


def needs_examples(model: str) -> bool:
    """Return True if prompts with tools should contain examples of calls for this model."""
    return not model.lower().startswith(_TRAINED_ON_TOOLS)


def write_call(name: str, arguments: str) -> str:
    """Return a call in the format that the model writes."""
    return CALL_NAME + json.dumps(name) + CALL_ARGUMENTS + arguments + "}" + CALL_CLOSING


def write_custom_call(name: str, text: str) -> str:
    """Return a custom tool's call in the format that the model writes."""
    return CALL_NAME + json.dumps(name) + CALL_INPUT + text + CALL_CLOSING


def _write_result(output: str) -> str:
    return f"<tool_response>\n{output}\n</tool_response>"


# Examples for models that were not trained on tools: when to call one, and when to answer. Their kinds and their order
# matter: of those measured on SmolLM2-135M, these gave the most correct decisions.
_EXAMPLES: tuple[tuple[str, str], ...] = (
    ("user", "Tell me a joke."),
    ("assistant", "Why did the chicken cross the road? To get to the other side!"),
    ("user", "Translate 'cat' to French."),
    ("assistant", write_call("translate", '{"text": "cat", "language": "French"}')),
    ("user", "Who wrote Hamlet?"),
    ("assistant", "Hamlet was written by William Shakespeare."),
    ("user", "Set a timer for 10 minutes."),
    ("assistant", write_call("set_timer", '{"minutes": 10}')),
    ("user", "Hello! How are you?"),
    ("assistant", "I am fine, thank you! How can I help you?"),
    ("user", "Turn on the lights in the kitchen."),
    ("assistant", write_call("set_lights", '{"room": "kitchen", "on": true}')),
    ("user", "Good evening!"),
    ("assistant", "Good evening! How can I help you?"),
    ("user", "What time is it in Tokyo?"),
    ("assistant", write_call("get_time", '{"city": "Tokyo"}')),
    ("user", "Who painted the Mona Lisa?"),
    ("assistant", "Leonardo da Vinci painted the Mona Lisa."),
    ("user", "Thanks!"),
    ("assistant", "You are welcome!"),
    ("user", "Calculate 3 times 4."),
    ("assistant", write_call("multiply", '{"a": 3, "b": 4}')),
)


def build_messages(turn: Turn, rules: OutputRules, *, examples: bool) -> list[TemplateMessage]:
    """Return the messages for a turn. With `examples`, a turn with tools starts with examples of calls."""
    written = [_write_item(item, f"input[{index}]") for index, item in enumerate(turn.items)]
    system = [text for role, text in written if role == "system"]
    if turn.request.instructions:
        system.insert(0, turn.request.instructions)
    if rules.may_call:
        system.append(_describe_tools(turn.request, add_greeting=not system, examples=examples))
    if rules.answer is not None:
        system.append(_describe_format(turn.request))
    messages = [("system", "\n\n".join(system or [_DEFAULT_INSTRUCTIONS]))]
    # After a tool result, the history is the example, and the model should answer.
    if rules.may_call and examples and not _ends_with_result(turn):
        messages += _EXAMPLES
    messages += [(role, text) for role, text in written if role in {"user", "assistant"}]
    return _merge_roles(messages)


def _ends_with_result(turn: Turn) -> bool:
    return bool(turn.items) and isinstance(turn.items[-1], items.FunctionCallOutput | items.CustomToolCallOutput)


def _merge_roles(messages: Iterable[tuple[str, str]]) -> list[TemplateMessage]:
    """Merge consecutive messages of one role: many templates require that the roles alternate."""
    merged: list[TemplateMessage] = []
    for role, text in messages:
        if merged and merged[-1]["role"] == role:
            merged[-1]["content"] += f"\n{text}"
        else:
            merged.append({"role": role, "content": text})
    return merged


def _describe_tools(request: CreateRequest, *, add_greeting: bool, examples: bool) -> str:
    greeting = f"{_DEFAULT_INSTRUCTIONS} " if add_greeting else ""
    lines = [f"{greeting}You can call these tools:" if examples else f"{greeting}{_WHEN_TO_CALL}\n<tools>"]
    tools = request.tools or ()
    for tool in tools:
        if isinstance(tool, FunctionTool):
            described = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}
            lines.append(json.dumps(described, ensure_ascii=False))
        elif isinstance(tool, CustomTool):
            lines.append(_describe_custom(tool))
    if not examples:
        lines.append(f"</tools>\n\nTo call a tool, write only:\n{write_call('<name>', '<arguments as JSON>')}")
    if any(isinstance(tool, CustomTool) for tool in tools):
        lines.append(f"To call a tool that has an input, write only:\n{write_custom_call('<name>', '<input>')}")
    return "\n".join(lines)


def _describe_custom(tool: CustomTool) -> str:
    described = {"name": tool.name, "description": tool.description or "", "input": "text"}
    if isinstance(tool.format, GrammarInput):
        described["input"] = f"text that matches this {tool.format.syntax} grammar: {tool.format.definition}"
    return json.dumps(described, ensure_ascii=False)


def _describe_format(request: CreateRequest) -> str:
    text_format = request.text.format if request.text is not None else None
    if isinstance(text_format, JsonSchemaFormat):
        about = f" ({text_format.description})" if text_format.description else ""
        schema = json.dumps(text_format.schema, ensure_ascii=False)
        return f"Answer with a JSON value, {text_format.name}{about}, that fits this schema:\n{schema}"
    assert isinstance(text_format, JsonObjectFormat)
    return "Answer with a JSON object."


def _write_item(item: items.Item | Unknown, path: str) -> tuple[str, str]:
    """Return the role and the text of an item. Earlier reasoning has no role: it is left out."""
    match item:
        case items.Message():
            role = "system" if item.role in {"system", "developer"} else item.role
            return role, _read_parts(item.content, f"{path}.content")
        case items.FunctionCall():
            return "assistant", write_call(item.name, _quote_invalid_json(item.arguments))
        case items.CustomToolCall():
            return "assistant", write_custom_call(item.name, item.input)
        case items.FunctionCallOutput() | items.CustomToolCallOutput():
            return "user", _write_result(_read_parts(item.output, f"{path}.output"))
        case items.Reasoning():
            return "none", ""
        case _:
            return "user", codec.encode(item).decode()


def _quote_invalid_json(arguments: str) -> str:
    try:
        read_json(arguments)
    except msgspec.DecodeError:
        return json.dumps(arguments)
    return arguments


def _read_parts(parts: "str | Sequence[content.Part | Unknown]", path: str) -> str:
    if isinstance(parts, str):
        return parts
    return "\n".join(_read_part(part, f"{path}[{index}].type") for index, part in enumerate(parts))


def _read_part(part: Any, path: str) -> str:
    if isinstance(part, _TEXT_PARTS):
        return part.text
    if isinstance(part, content.Refusal):
        return part.refusal
    if isinstance(part, Unknown):
        return part.raw.decode()
    raise InvalidRequest(f"The embedded model reads text only, not '{part.type}'.", param=path)
