"""The tools of a turn: which of the offered ones can be served, and whether `tool_choice` fits them."""

from collections.abc import Iterator, Mapping, Sequence

from antiphon.backends.base import Capabilities
from antiphon.config import UnsupportedTools
from antiphon.engine.serve.tool_emulation.grammar import find_grammar_error
from antiphon.errors import InvalidRequest, UnsupportedTool
from antiphon.protocol.hosted import AdditionalTools, ToolSearchOutput
from antiphon.protocol.items import Item
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import (
    AllowedToolsChoice,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    GrammarInput,
    McpTool,
    NamespaceTool,
    ShellTool,
    Tool,
    ToolSearchTool,
    WebSearchTool,
)
from antiphon.protocol.unions import Unknown

Tools = list[Tool | Unknown]

_NAMED = (FunctionTool, CustomTool)
_BRINGING = (AdditionalTools, ToolSearchOutput)
# Every request is asked whether it has any, and hardly one has.
_KINDS_BRINGING = frozenset(_BRINGING)


def select_tools(
    request: CreateRequest,
    *,
    capabilities: Capabilities,
    unsupported: UnsupportedTools = "default",
    functions_only: bool = False,
    earlier: Sequence[Item | Unknown] = (),
) -> tuple[Tools, list[str]]:
    """The tools to show the model, and warnings about those left out.

    Raises on a tool that cannot be served, unless it is to be dropped. `functions_only` drops all but functions.
    `earlier` are items that the request builds on: the tools that they brought can be chosen.
    """
    kept: dict[str, Tool | Unknown] = {}
    warnings: list[str] = []
    for index, tool in enumerate(request.tools or ()):
        path = f"tools[{index}]"
        if functions_only and not isinstance(tool, FunctionTool):
            warnings.append(_leave_out(tool, path))
        elif _admit(tool, path, capabilities, unsupported, warnings):
            kept[path] = tool
    _check_names(kept)
    tools = list(kept.values())
    if request.tool_choice not in (None, "auto", "none"):
        brought = [*_list_brought(earlier), *_list_brought(request.input)]
        _check_choice(request, tools + brought, capabilities)
    return tools, warnings


def _list_brought(items: str | Sequence[Item | Unknown] | None) -> Tools:
    if items is None or isinstance(items, str):
        return []
    if _KINDS_BRINGING.isdisjoint(map(type, items)):
        return []
    return [tool for item in items if isinstance(item, _BRINGING) for tool in item.tools]


def check_item_tools(
    items: Sequence[Item | Unknown], *, capabilities: Capabilities, unsupported: UnsupportedTools = "default"
) -> list[str]:
    """The same for the tools that come with a request's items. They stay in the items; the model is not shown them."""
    warnings: list[str] = []
    if _KINDS_BRINGING.isdisjoint(map(type, items)):
        return warnings
    for index, item in enumerate(items):
        if isinstance(item, _BRINGING):
            for place, tool in enumerate(item.tools):
                _admit(tool, f"input[{index}].tools[{place}]", capabilities, unsupported, warnings)
    return warnings


def _admit(
    tool: Tool | Unknown, path: str, capabilities: Capabilities, unsupported: UnsupportedTools, warnings: list[str]
) -> bool:
    """Whether the tool can be served. Raises if it cannot, unless it is to be dropped: there is a warning then."""
    fault = None if capabilities.any_tool else _find_fault(tool, path, capabilities)
    if fault is None:
        return True
    # Codex offers web search whether or not the server has it, and cannot be told not to.
    default = "drop" if isinstance(tool, WebSearchTool) else "refuse"
    if (default if unsupported == "default" else unsupported) == "refuse":
        raise fault
    warnings.append(_leave_out(tool, path))
    return False


def _find_fault(tool: Tool | Unknown, path: str, capabilities: Capabilities) -> UnsupportedTool | None:
    if tool.type not in capabilities.tools:
        return UnsupportedTool(f"Tools of type '{tool.type}' are not supported by this server.", param=path)
    if isinstance(tool, FunctionTool):  # nearly always
        return None
    if isinstance(tool, ShellTool) and (tool.environment or {}).get("type", "local") != "local":
        where = tool.environment["type"] if tool.environment else None
        return UnsupportedTool(f"This server has no shell of its own ('{where}').", param=f"{path}.environment")
    if isinstance(tool, CustomTool):
        _check_grammar(tool, path)
    if isinstance(tool, NamespaceTool):
        for index, child in enumerate(tool.tools):
            inner = f"{path}.tools[{index}]"
            if not isinstance(child, _NAMED):
                told = f"A namespace can hold functions and custom tools, not '{child.type}'."
                return UnsupportedTool(told, param=inner)
            if isinstance(child, CustomTool):
                _check_grammar(child, inner)
    return None


def _check_grammar(tool: CustomTool, path: str) -> None:
    fault = find_grammar_error(tool.format) if isinstance(tool.format, GrammarInput) else None
    if fault is not None:
        raise InvalidRequest(
            f"The grammar of the tool '{tool.name}' cannot be read: {fault}",
            param=f"{path}.format.definition",
            code="invalid_value",
        )


def _leave_out(tool: Tool | Unknown, path: str) -> str:
    return f"{path}: {tool.type} is not available here and was left out"


def _check_names(tools: Mapping[str, Tool | Unknown]) -> None:
    """A name stands for one tool of its namespace, and of the tools without a name there is one."""
    seen: set[tuple[str | None, str]] = set()
    for place, tool in tools.items():
        for path, identity in _identify(tool, place):
            if identity in seen:
                raise InvalidRequest(f"The tool name '{identity[1]}' is used twice.", param=path, code="duplicate_tool")
            seen.add(identity)


def _identify(tool: Tool | Unknown, path: str) -> Iterator[tuple[str, tuple[str | None, str]]]:
    if isinstance(tool, _NAMED):
        yield f"{path}.name", (None, tool.name)
    elif isinstance(tool, NamespaceTool):
        for index, child in enumerate(tool.tools):
            if isinstance(child, _NAMED):
                yield f"{path}.tools[{index}].name", (tool.name, child.name)
    elif isinstance(tool, McpTool):
        yield f"{path}.server_label", ("mcp", tool.server_label)
    elif tool.type in _SINGLE:  # which no tool of an unknown type is
        yield path, ("", tool.type)


_SINGLE = frozenset({"tool_search", "local_shell", "shell", "apply_patch", "computer", "computer_use_preview"})
# A choice may call the same tool by another name.
_ALIASES = {"computer_use": "computer", "computer_use_preview": "computer", "tool": "function"}


def _check_choice(request: CreateRequest, tools: Tools, capabilities: Capabilities) -> None:
    choice = request.tool_choice
    if choice == "required" and not tools:
        raise InvalidRequest(
            "'tool_choice' is 'required', but there are no tools.", param="tool_choice", code="invalid_value"
        )
    if choice is None or isinstance(choice, str) or (capabilities.any_tool and not _is_self_contained(request, tools)):
        return
    if isinstance(choice, FunctionChoice | CustomChoice):
        _check_name(choice.name, tools, "tool_choice.name")
    elif isinstance(choice, AllowedToolsChoice):
        for index, allowed in enumerate(choice.tools):
            _check_allowed(allowed, tools, f"tool_choice.tools[{index}]", any_type=capabilities.any_tool)
    elif capabilities.any_tool:
        return
    elif isinstance(choice, Unknown):  # nobody could say what it asks for
        raise UnsupportedTool(f"A choice of type '{choice.type}' is not supported by this server.", param="tool_choice")
    else:
        _check_type(choice.type, tools, "tool_choice")


def _is_self_contained(request: CreateRequest, tools: Tools) -> bool:
    """Whether these are all the tools that a backend with tools of its own can know of by name."""
    continues = request.previous_response_id is not None or request.conversation is not None
    return not continues and not any(isinstance(tool, Unknown | ToolSearchTool) for tool in tools)


def _check_allowed(allowed: JsonObject, tools: Tools, path: str, *, any_type: bool) -> None:
    kind, name, namespace = allowed.get("type"), allowed.get("name"), allowed.get("namespace")
    if kind in ("function", "tool", "custom"):
        _check_name(name, tools, f"{path}.name", namespace=namespace)
    elif kind == "namespace":
        if name not in {tool.name for tool in tools if isinstance(tool, NamespaceTool)}:
            raise InvalidRequest(
                f"There is no namespace '{name}' in 'tools'.", param=f"{path}.name", code="invalid_value"
            )
    elif not any_type:
        _check_type(str(kind), tools, f"{path}.type")


def _check_name(name: object, tools: Tools, path: str, *, namespace: object = None) -> None:
    """A child may be named without its namespace, as long as only one has that name."""
    found = {  # one that comes with several turns is one
        identity
        for tool in tools
        for _, identity in _identify(tool, path)
        if identity[1] == name and identity[0] != "" and namespace in (None, identity[0])
    }
    if not found:
        raise InvalidRequest(f"There is no tool named '{name}' in 'tools'.", param=path, code="invalid_value")
    if len(found) > 1 and (None, name) not in found:
        raise InvalidRequest(f"More than one namespace has a tool named '{name}'.", param=path, code="invalid_value")


def _check_type(kind: str, tools: Tools, path: str) -> None:
    if _ALIASES.get(kind, kind) not in {_ALIASES.get(tool.type, tool.type) for tool in tools}:
        raise UnsupportedTool(f"There is no tool of type '{kind}' that could be called.", param=path)
