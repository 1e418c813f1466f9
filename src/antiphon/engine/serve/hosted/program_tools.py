"""The tools that a program can call, and the values of their results."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from antiphon.engine.serve.hosted.toolset import HostedToolset, OpenSession, allows_caller
from antiphon.engine.serve.tool_emulation.client_tools import make_call_item, make_function_tool
from antiphon.protocol.content import extract_text
from antiphon.protocol.hosted import (
    AdditionalTools,
    ApplyPatchCallOutput,
    CodeInterpreterCall,
    McpApprovalResponse,
    McpCall,
    ShellCallOutput,
    ToolSearchOutput,
)
from antiphon.protocol.items import CustomToolCallOutput, FunctionCallOutput, Item
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.protocol.tools import (
    CodeInterpreterTool,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ShellTool,
    Tool,
    ToolSearchTool,
)
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.tools.hosted.program.messages import CallResult
from antiphon.tools.hosted.program.tool import ProgramTool

DENIED = "The user did not approve this call. It was not executed."
_COMMAND_RESULTS = "an array with an object for each command: {stdout, stderr, outcome}"
_RETURNS: dict[type, str] = {CodeInterpreterTool: "the output as a string", ShellTool: _COMMAND_RESULTS}


class NestedTool(NamedTuple):
    """A tool that programs can call: a hosted function of a session, or a tool that the client runs."""

    shown: ProgramTool
    opened: OpenSession | None = None
    own_name: str = ""
    client: Tool | None = None
    namespace: str | None = None


def list_nested_tools(toolset: HostedToolset, items: Iterable[Item | Unknown]) -> dict[str, NestedTool]:
    """Return the tools that a program can call, by their names. `items` may add tools or load deferred ones."""
    nested: dict[str, NestedTool] = {}
    for name, opened, function in toolset.list_callable_functions():
        shown = ProgramTool(
            name=name,
            description=function.description,
            parameters=function.parameters,
            returns=_RETURNS.get(type(opened.entry), "a string"),
        )
        nested[name] = NestedTool(shown, opened, function.name)
    for tool in _list_client_tools(toolset.client_tools, items):
        nested.setdefault(tool.shown.name, tool)
    return nested


def _list_client_tools(tools: Sequence[Tool | Unknown], items: Iterable[Item | Unknown]) -> Iterator[NestedTool]:
    has_search = any(isinstance(tool, ToolSearchTool) for tool in tools)
    for namespace, tool in _flatten(tools):
        if not (has_search and getattr(tool, "defer_loading", None)):
            yield from _make_nested(tool, namespace, is_loaded=False)
    for item in items:
        if isinstance(item, AdditionalTools | ToolSearchOutput):
            for namespace, tool in _flatten(item.tools):
                yield from _make_nested(tool, namespace, is_loaded=isinstance(item, ToolSearchOutput))


def _flatten(tools: Iterable[Tool | Unknown]) -> Iterator[tuple[str | None, Tool | Unknown]]:
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from ((tool.name, child) for child in tool.tools)
        else:
            yield None, tool


def _make_nested(tool: Tool | Unknown, namespace: str | None, *, is_loaded: bool) -> Iterator[NestedTool]:
    if isinstance(tool, Unknown) or not allows_caller(tool, "programmatic"):
        return
    if isinstance(tool, FunctionTool | CustomTool):
        name = f"{namespace}__{tool.name}" if namespace is not None else tool.name
        # The API names a function that was loaded by a search as its own namespace.
        own = tool.name if is_loaded and namespace is None and isinstance(tool, FunctionTool) else None
        shown = ProgramTool(
            name=name,
            description=tool.description or "",
            parameters=tool.parameters if isinstance(tool, FunctionTool) else None,
            output_schema=tool.output_schema if isinstance(tool, FunctionTool) else None,
            takes_text=isinstance(tool, CustomTool),
        )
        yield NestedTool(shown, client=tool, own_name=tool.name, namespace=namespace or own)
    elif tool.type in ("shell", "apply_patch"):
        function = make_function_tool(tool, tool.type)
        returns = _COMMAND_RESULTS if tool.type == "shell" else "an object: {status, output}"
        shown = ProgramTool(
            name=tool.type, description=function.description or "", parameters=function.parameters, returns=returns
        )
        yield NestedTool(shown, client=tool, own_name=tool.type)


def make_client_call(tool: NestedTool, arguments: str, *, key: str, call_id: str, program_id: str) -> list[Delta]:
    """Return the deltas of a call that the client has to run.

    Raises msgspec.ValidationError if the arguments do not fit the tool.
    """
    caller: JsonObject = {"type": "program", "caller_id": program_id}
    assert tool.client is not None
    if isinstance(tool.client, FunctionTool):
        call: Delta = deltas.ToolCall(key, arguments, tool.own_name, call_id, tool.namespace, caller)
        return [call, deltas.CloseItem(key)]
    if isinstance(tool.client, CustomTool):
        text = read_text(arguments)
        return [
            deltas.CustomToolCall(key, text, tool.own_name, call_id, tool.namespace, caller),
            deltas.CloseItem(key),
        ]
    item = make_call_item(tool.client, read_json(arguments), call_id)
    return [deltas.WholeItem(msgspec.structs.replace(item, caller=caller, status="in_progress"))]


def read_text(arguments: str) -> str:
    """Return the text for a custom tool: a string, or the member `input` of an object."""
    value = read_json(arguments)
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        value = value["input"]
    if not isinstance(value, str):
        raise msgspec.ValidationError("the argument must be a string")
    return value


# Values of results


def make_result(number: int, value: Any) -> CallResult:
    return CallResult(number, msgspec.json.encode(value).decode())


def make_error(number: int, message: str) -> CallResult:
    return CallResult(number, msgspec.json.encode(message).decode(), is_error=True)


def read_client_output(number: int, tool: NestedTool, item: Any) -> CallResult:
    """Return the result of a call that the client has run."""
    match item:
        case ShellCallOutput():
            return make_result(number, _list_command_results(item))
        case ApplyPatchCallOutput():
            return make_result(number, {"status": item.status, "output": item.output})
        case FunctionCallOutput() | CustomToolCallOutput():
            return _read_content(number, tool, item.output)
    return make_error(number, "The output of the call has another type.")


def _read_content(number: int, tool: NestedTool, output: Any) -> CallResult:
    if not isinstance(output, str):
        parts = msgspec.to_builtins(output)
        if any(part.get("type") not in ("input_text", "output_text", "text") for part in parts):
            return make_result(number, parts)
        output = extract_text(output)
    if tool.shown.output_schema is None:
        return make_result(number, output)
    try:
        return make_result(number, read_json(output))
    except msgspec.DecodeError:
        return make_error(number, f"The output of {tool.shown.name} is not JSON, although it has an output_schema.")


def read_hosted_item(number: int, item: Any) -> CallResult | None:
    """Return the result of a call that this server has run, or None if the item does not have it."""
    match item:
        case McpCall():
            if item.error is not None or item.status == "failed":
                return make_error(number, _describe_error(item.error))
            return None if item.output is None else make_result(number, item.output)
        case CodeInterpreterCall(outputs=None):
            return None
        case CodeInterpreterCall():
            logs = "".join(str(output.get("logs", "")) for output in item.outputs or () if output["type"] == "logs")
            return make_result(number, logs) if item.status == "completed" else make_error(number, logs)
        case ShellCallOutput():
            return make_result(number, _list_command_results(item))
    return None


def read_decision(number: int, decision: McpApprovalResponse | None) -> CallResult:
    """Return the result of a call that was not approved."""
    reason = f" Reason: {decision.reason}" if decision is not None and decision.reason else ""
    return make_result(number, DENIED + reason)


def _list_command_results(item: ShellCallOutput) -> list[JsonObject]:
    return [{"stdout": each.stdout, "stderr": each.stderr, "outcome": each.outcome} for each in item.output]


def _describe_error(error: Any) -> str:
    if isinstance(error, dict):
        if isinstance(error.get("message"), str):
            return str(error["message"])
        content = error.get("content")
        if isinstance(content, list):
            texts = [str(part["text"]) for part in content if isinstance(part, dict) and "text" in part]
            if texts:
                return "\n".join(texts)
    return str(error or "The call failed.")
