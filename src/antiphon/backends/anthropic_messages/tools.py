"""The tools of a turn, and which of them the model may or must call."""

from collections.abc import Iterable
from typing import Any

from antiphon.backends.anthropic_messages.names import name_tool
from antiphon.backends.anthropic_messages.schema import fit
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import FunctionChoice, FunctionTool

Json = dict[str, Any]

MOST_STRICT_TOOLS = 20
"""The API refuses a request that has more."""


def write_tools(request: CreateRequest, *, called: Iterable[str], strict: bool) -> Json:
    """`tools` and `tool_choice`. `called` are the tools that the history has calls of: the API wants to know them."""
    choice, tools = request.tool_choice, [tool for tool in request.tools or () if isinstance(tool, FunctionTool)]
    if not tools:
        known = [FunctionTool(name) for name in called]
        return {"tools": [_write_tool(tool, strict=False) for tool in known], "tool_choice": _NONE} if known else {}
    strict = strict and sum(bool(tool.strict) for tool in tools) <= MOST_STRICT_TOOLS
    written: Json = {"tools": [_write_tool(tool, strict=strict) for tool in tools]}
    chosen = _write_choice(choice)
    if request.parallel_tool_calls is False and chosen != _NONE:
        chosen = chosen | {"disable_parallel_tool_use": True}
    if chosen != _AUTO:
        written["tool_choice"] = chosen
    return written


def is_forced(written: Json) -> bool:
    """Whether the model has to call a tool."""
    return written.get("tool_choice", _AUTO)["type"] in {"any", "tool"}


_AUTO = {"type": "auto"}
_NONE = {"type": "none"}


def _write_choice(choice: Any) -> Json:
    if isinstance(choice, FunctionChoice):
        return {"type": "tool", "name": name_tool(choice.name)}
    if choice == "required":
        return {"type": "any"}
    return _NONE if choice == "none" else _AUTO


def _write_tool(tool: FunctionTool, *, strict: bool) -> Json:
    written: Json = {"name": name_tool(tool.name)}
    if tool.description:
        written["description"] = tool.description
    parameters = tool.parameters or {}
    fitted = fit({"type": "object"} | parameters) if strict and tool.strict else None
    if fitted is not None:
        return written | {"input_schema": fitted, "strict": True}
    return written | {"input_schema": {"type": "object", "properties": {}} | parameters}
