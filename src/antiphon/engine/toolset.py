"""The tools of a turn: which of the offered ones can be served, and whether `tool_choice` fits them."""

from antiphon.errors import InvalidRequest, UnsupportedTool
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import AllowedToolsChoice, FunctionChoice, FunctionTool, Tool, WebSearchTool


def select_tools(request: CreateRequest, *, drop_others: bool = False) -> tuple[list[FunctionTool], list[str]]:
    """The tools to show the model, and warnings about those left out.

    Raises on a tool that cannot be served, unless the others are to be dropped.
    """
    kept: dict[str, FunctionTool] = {}
    warnings: list[str] = []
    for index, tool in enumerate(request.tools or ()):
        if isinstance(tool, WebSearchTool) or (drop_others and not isinstance(tool, FunctionTool)):
            # Codex offers web search whether or not the server has it, and cannot be told not to.
            warnings.append(f"tools[{index}]: {tool.type} is not available here and was left out")
            continue
        function = _require_function(tool, index)
        if function.name in kept:
            raise InvalidRequest(
                f"The tool name '{function.name}' is used twice.", param=f"tools[{index}].name", code="duplicate_tool"
            )
        kept[function.name] = function
    _check_choice(request, kept)
    return list(kept.values()), warnings


def _require_function(tool: Tool | Unknown, index: int) -> FunctionTool:
    if isinstance(tool, FunctionTool):
        return tool
    raise UnsupportedTool(f"Tools of type '{tool.type}' are not supported by this server.", param=f"tools[{index}]")


def _check_choice(request: CreateRequest, tools: dict[str, FunctionTool]) -> None:
    choice = request.tool_choice
    if choice == "required" and not tools:
        raise InvalidRequest(
            "'tool_choice' is 'required', but there are no tools.", param="tool_choice", code="invalid_value"
        )
    if choice is None or isinstance(choice, str):
        return
    if isinstance(choice, FunctionChoice):
        _check_name(choice.name, tools, "tool_choice.name")
    elif isinstance(choice, AllowedToolsChoice):
        for index, allowed in enumerate(choice.tools):
            _check_allowed(allowed, tools, f"tool_choice.tools[{index}]")
    else:
        raise UnsupportedTool(f"A 'tool_choice' of type '{choice.type}' is not supported.", param="tool_choice")


def _check_allowed(allowed: dict[str, object], tools: dict[str, FunctionTool], param: str) -> None:
    if allowed.get("type") not in ("function", "tool"):
        raise UnsupportedTool(f"Only functions can be allowed, not '{allowed.get('type')}'.", param=f"{param}.type")
    _check_name(allowed.get("name"), tools, f"{param}.name")


def _check_name(name: object, tools: dict[str, FunctionTool], param: str) -> None:
    if name not in tools:
        raise InvalidRequest(f"There is no tool named '{name}' in 'tools'.", param=param, code="invalid_value")
