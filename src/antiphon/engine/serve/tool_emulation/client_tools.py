"""Client-side tools (shell, apply_patch, computer, custom): declare them as functions and build their call items."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from antiphon.protocol.hosted import (
    ApplyPatchCall,
    ComputerCall,
    LocalShellAction,
    LocalShellCall,
    ShellAction,
    ShellCall,
    ToolSearchCall,
)
from antiphon.protocol.items import OutputItem
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.tools import (
    ComputerUsePreviewTool,
    CustomTool,
    FunctionTool,
    GrammarInput,
    ShellTool,
    Tool,
    ToolSearchTool,
)

_TEXT: JsonObject = {"type": "string"}
_TEXTS: JsonObject = {"type": "array", "items": _TEXT}
_NUMBER: JsonObject = {"type": "integer"}


def _object(properties: JsonObject, *required: str) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_SHELL = _object({"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}, "commands")
_LOCAL_SHELL = _object(
    {
        "command": _TEXTS | {"description": "The program and its arguments, each by itself."},
        "working_directory": _TEXT,
        "env": {"type": "object", "additionalProperties": _TEXT},
        "timeout_ms": _NUMBER,
        "user": _TEXT,
    },
    "command",
)
_APPLY_PATCH = _object(
    {
        "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        "path": _TEXT,
        "diff": _TEXT
        | {
            "description": "Lines that begin with '+' are added, with '-' removed, with a space kept; '@@' begins a "
            "place further down. A new file has only lines with '+'. Left out to delete a file."
        },
    },
    "type",
    "path",
)
_ACTION = _object(
    {
        "type": {
            "type": "string",
            "enum": ["click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait"],
        },
        "x": _NUMBER,
        "y": _NUMBER,
        "button": {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]},
        "keys": _TEXTS,
        "text": _TEXT,
        "scroll_x": _NUMBER,
        "scroll_y": _NUMBER,
        "path": {"type": "array", "items": _object({"x": _NUMBER, "y": _NUMBER}, "x", "y")},
    },
    "type",
)
_QUERY = _object({"query": _TEXT | {"description": "Words that the tool's name or description has."}}, "query")


def make_function_tool(tool: Tool, name: str) -> FunctionTool:
    """Return a function tool of this name that emulates the tool."""
    match tool:
        case FunctionTool():
            return msgspec.structs.replace(tool, name=name, defer_loading=None)
        case CustomTool():
            return FunctionTool(name, _describe_custom(tool), _object({"input": _TEXT}, "input"), strict=False)
        case ToolSearchTool():
            parameters = tool.parameters if isinstance(tool.parameters, dict) else _QUERY
            return FunctionTool(name, tool.description or "Finds tools and loads them.", parameters, strict=False)
        case ComputerUsePreviewTool():
            size = f"{tool.display_width}x{tool.display_height}"
            description = (
                f"Does one thing on a computer ({tool.environment}, a screen of {size}); its screen is shown then."
            )
            return FunctionTool(name, description, _object({"action": _ACTION}, "action"), strict=False)
        case _:
            description, parameters = _DECLARATIONS[tool.type]
            return FunctionTool(name, description, parameters, strict=False)


_DECLARATIONS: dict[str, tuple[str, JsonObject]] = {
    "shell": ("Runs shell commands, each in a shell of its own.", _SHELL),
    "local_shell": ("Runs a program on the user's computer.", _LOCAL_SHELL),
    "apply_patch": ("Creates, updates or deletes a file.", _APPLY_PATCH),
    "computer": (
        "Does things on a computer, one after the other; its screen is shown then.",
        _object({"actions": {"type": "array", "items": _ACTION}}, "actions"),
    ),
}


def _describe_custom(tool: CustomTool) -> str:
    lines = [tool.description] if tool.description else []
    lines.append("Put the whole text for this tool into 'input'.")
    if isinstance(tool.format, GrammarInput):
        dialect = "Lark grammar" if tool.format.syntax == "lark" else "regular expression"
        lines.append(f"The text must match this {dialect}:\n{tool.format.definition}")
    return "\n".join(lines)


def make_call_item(tool: Tool, arguments: Any, call_id: str) -> OutputItem:
    """Return the output item for a call of this tool, with an empty id.

    Raises msgspec.ValidationError if the arguments do not fit the tool.
    """
    match tool.type:
        case "shell":
            assert isinstance(tool, ShellTool)
            environment = {"type": "local"} if tool.environment is None else {"type": tool.environment.get("type")}
            action = msgspec.convert(arguments, ShellAction)
            return ShellCall(call_id, action, environment=environment, status="completed")
        case "local_shell":
            local = msgspec.convert(arguments, _LocalShellArguments)
            return LocalShellCall(call_id, LocalShellAction(**msgspec.structs.asdict(local)), "", "completed")
        case "apply_patch":
            operation = msgspec.convert(arguments, _CreateFile | _UpdateFile | _DeleteFile)
            return ApplyPatchCall(call_id, msgspec.to_builtins(operation), "completed")
        case "computer":
            actions = [_to_dict(action) for action in msgspec.convert(arguments, _Actions).actions]
            return ComputerCall(call_id, [], "", "completed", actions=actions)
        case "computer_use_preview":
            single_action = _to_dict(msgspec.convert(arguments, _OneAction).action)
            return ComputerCall(call_id, [], "", "completed", action=single_action)
        case _:
            return ToolSearchCall(arguments, call_id=call_id, execution="client", status="completed")


def _to_dict(action: "_Action") -> JsonObject:
    fields: JsonObject = msgspec.to_builtins(action)
    return fields


# Argument structs. They are stricter than the item structs, which must also accept calls of other servers.


class _LocalShellArguments(Struct, forbid_unknown_fields=True):
    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class _Tagged(Struct, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    pass


class _CreateFile(_Tagged, tag="create_file"):
    path: str
    diff: str


class _UpdateFile(_Tagged, tag="update_file"):
    path: str
    diff: str


class _DeleteFile(_Tagged, tag="delete_file"):
    path: str


class _Point(Struct, forbid_unknown_fields=True):
    x: int
    y: int


class _Click(_Tagged, tag="click"):
    x: int
    y: int
    button: Literal["left", "right", "wheel", "back", "forward"] = msgspec.field(default_factory=lambda: "left")
    keys: list[str] | None = None


class _DoubleClick(_Tagged, tag="double_click"):
    x: int
    y: int
    keys: list[str] | None = None


class _Drag(_Tagged, tag="drag"):
    path: list[_Point]
    keys: list[str] | None = None


class _Keypress(_Tagged, tag="keypress"):
    keys: list[str]


class _Move(_Tagged, tag="move"):
    x: int
    y: int
    keys: list[str] | None = None


class _Screenshot(_Tagged, tag="screenshot"):
    pass


class _Scroll(_Tagged, tag="scroll"):
    x: int
    y: int
    scroll_x: int
    scroll_y: int
    keys: list[str] | None = None


class _Type(_Tagged, tag="type"):
    text: str


class _Wait(_Tagged, tag="wait"):
    pass


_Action = _Click | _DoubleClick | _Drag | _Keypress | _Move | _Screenshot | _Scroll | _Type | _Wait


class _Actions(Struct, forbid_unknown_fields=True):
    actions: list[_Action]


class _OneAction(Struct, forbid_unknown_fields=True):
    action: _Action
