"""The tools of a turn: check that each tool can be served and that `tool_choice` names one of them."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from antiphon.backends.base import Capabilities
from antiphon.config.settings import UnsupportedTools
from antiphon.errors import AntiphonError, InvalidRequest, UnsupportedTool
from antiphon.protocol.hosted import AdditionalTools, ToolSearchOutput
from antiphon.protocol.items import Item
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tool_lists import SharedTools, derive
from antiphon.protocol.tools import (
    AllowedToolsChoice,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    McpChoice,
    McpTool,
    NamespaceTool,
    ShellTool,
    Tool,
    ToolSearchTool,
    WebSearchTool,
)
from antiphon.protocol.unions import Unknown
from antiphon.tools.hosted.registry import NO_HOSTED_TOOLS, HostedTools

Tools = list[Tool | Unknown]

_NAMED_TYPES = (FunctionTool, CustomTool)
# Tool types of which a request can have only one, as they have no names.
_UNNAMED_TYPES = frozenset(
    {
        "tool_search",
        "local_shell",
        "shell",
        "apply_patch",
        "computer",
        "computer_use_preview",
        "programmatic_tool_calling",
    }
)
# Other names of tool types in `tool_choice`.
_TYPE_ALIASES = {
    "computer_use": "computer",
    "computer_use_preview": "computer",
    "tool": "function",
    "web_search_2025_08_26": "web_search",
    "web_search_preview": "web_search",
    "web_search_preview_2025_03_11": "web_search",
}
# Item types that add tools. The set is for a fast test: hardly any request has such an item.
_ITEMS_WITH_TOOLS = (AdditionalTools, ToolSearchOutput)
_ITEMS_WITH_TOOLS_SET = frozenset(_ITEMS_WITH_TOOLS)


def select_tools(
    request: CreateRequest,
    *,
    capabilities: Capabilities,
    unsupported: UnsupportedTools = "default",
    functions_only: bool = False,
    history: Sequence[Item | Unknown] = (),
    hosted: HostedTools = NO_HOSTED_TOOLS,
    hosted_types: frozenset[str] = frozenset(),
) -> tuple[Tools, list[str]]:
    """Return the tools to show the model, and warnings about dropped tools. Neither may be changed.

    Raises UnsupportedTool on a tool that cannot be served, unless the policy is to drop it. `functions_only` drops all
    other tools. `tool_choice` may also name tools of `history` items and of the input. `hosted_types` are the types
    among `hosted` that this server runs for the backend.
    """
    tools: Tools = []
    warnings: list[str] = []
    if hosted_types and request.tools and type(request.tools) is not SharedTools:  # shared lists have no hosted tools
        capabilities = msgspec.structs.replace(capabilities, tools=capabilities.tools | hosted_types)
    if request.tools:
        key = ("select_tools", capabilities.tools, capabilities.any_tool, unsupported, functions_only)
        tools, warnings = derive(
            request.tools,
            key,
            lambda sent: _select(
                sent, capabilities, unsupported, functions_only=functions_only, reasons=hosted.unavailable
            ),
        )
    if request.tool_choice not in (None, "auto", "none"):
        item_tools = [*_list_item_tools(history), *_list_item_tools(request.input)]
        _check_tool_choice(request, tools + item_tools, capabilities, hosted_types, hosted.unavailable)
    return tools, warnings


def explain_inherited_tools(error: AntiphonError) -> None:
    """Change an error about an inherited tool, so that it names the field that brings the tool."""
    if error.param is not None and (error.param == "tools" or error.param.startswith("tools[")):
        error.param = "previous_response_id"
        error.message += (
            " The tool is inherited from the previous response: send 'tools' to use others, or [] for none."
        )
        error.args = (error.message,)


def _select(
    sent: Tools,
    capabilities: Capabilities,
    unsupported: UnsupportedTools,
    *,
    functions_only: bool,
    reasons: Mapping[str, str],
) -> tuple[Tools, list[str]]:
    selected: dict[str, Tool | Unknown] = {}
    warnings: list[str] = []
    for index, tool in enumerate(sent):
        path = f"tools[{index}]"
        if functions_only and not isinstance(tool, FunctionTool):
            warnings.append(_describe_dropped(tool, path))
        elif _can_serve(tool, path, capabilities, unsupported, warnings, reasons):
            selected[path] = tool
    _check_unique_names(selected)
    if not capabilities.any_tool:
        _check_callers(selected, sent)
    return (sent if len(selected) == len(sent) else list(selected.values())), warnings


def _list_item_tools(items: str | Sequence[Item | Unknown] | None) -> Tools:
    if items is None or isinstance(items, str):
        return []
    if _ITEMS_WITH_TOOLS_SET.isdisjoint(map(type, items)):
        return []
    return [tool for item in items if isinstance(item, _ITEMS_WITH_TOOLS) for tool in item.tools]


def check_item_tools(
    items: Sequence[Item | Unknown], *, capabilities: Capabilities, unsupported: UnsupportedTools = "default"
) -> list[str]:
    """Check the tools of input items, as `select_tools` does for the request's. Return warnings about dropped tools."""
    warnings: list[str] = []
    if _ITEMS_WITH_TOOLS_SET.isdisjoint(map(type, items)):
        return warnings
    for index, item in enumerate(items):
        if isinstance(item, _ITEMS_WITH_TOOLS):
            for position, tool in enumerate(item.tools):
                _can_serve(tool, f"input[{index}].tools[{position}]", capabilities, unsupported, warnings)
    return warnings


def _can_serve(
    tool: Tool | Unknown,
    path: str,
    capabilities: Capabilities,
    unsupported: UnsupportedTools,
    warnings: list[str],
    reasons: Mapping[str, str] | None = None,
) -> bool:
    """Return True if the tool can be served. Else raise UnsupportedTool, or add a warning if the tool is dropped."""
    fault = None if capabilities.any_tool else _find_fault(tool, path, capabilities)
    if fault is None:
        return True
    # Codex sends a web search tool by default, and an error would end its session.
    default = "drop" if isinstance(tool, WebSearchTool) else "refuse"
    if (default if unsupported == "default" else unsupported) == "refuse":
        if reasons and tool.type in reasons:
            raise UnsupportedTool(f"{fault.message} {reasons[tool.type]}", param=fault.param)
        raise fault
    warnings.append(_describe_dropped(tool, path))
    return False


def _find_fault(tool: Tool | Unknown, path: str, capabilities: Capabilities) -> UnsupportedTool | None:
    if tool.type not in capabilities.tools:
        return UnsupportedTool(f"Tools of type '{tool.type}' are not supported by this server.", param=path)
    if isinstance(tool, FunctionTool):  # the common case
        return None
    if isinstance(tool, ShellTool) and (tool.environment or {}).get("type", "local") != "local":
        where = tool.environment["type"] if tool.environment else None
        message = (
            f"This server runs no shell ('{where}'). Use the environment 'local', whose commands the client runs, or "
            "the tool 'code_interpreter'."
        )
        return UnsupportedTool(message, param=f"{path}.environment")
    if isinstance(tool, NamespaceTool):
        for index, child in enumerate(tool.tools):
            inner = f"{path}.tools[{index}]"
            if not isinstance(child, _NAMED_TYPES):
                message = f"A namespace can contain functions and custom tools, not '{child.type}'."
                return UnsupportedTool(message, param=inner)
    return None


def _describe_dropped(tool: Tool | Unknown, path: str) -> str:
    return f"{path}: {tool.type} is not available here and was left out"


def _check_unique_names(tools: Mapping[str, Tool | Unknown]) -> None:
    """Raise InvalidRequest if a namespace has two tools of one name, or two unnamed tools have one type."""
    seen: set[tuple[str | None, str]] = set()
    for tool_path, tool in tools.items():
        for path, key in _list_keys(tool, tool_path):
            if key in seen:
                raise InvalidRequest(f"The tool name '{key[1]}' is used twice.", param=path, code="duplicate_tool")
            seen.add(key)


def _check_callers(tools: Mapping[str, Tool | Unknown], sent: Tools) -> None:
    """Raise InvalidRequest if only programs may call a tool, and the request has no programs."""
    for path, tool in tools.items():
        callers = getattr(tool, "allowed_callers", None)
        if callers is not None and "direct" not in callers:
            if any(each.type == "programmatic_tool_calling" for each in sent):
                return
            message = (
                f"Invalid value for '{path}.allowed_callers': only programs could call the tool, but there is no tool "
                "of type 'programmatic_tool_calling'."
            )
            raise InvalidRequest(message, param=f"{path}.allowed_callers", code="invalid_value")


def _list_keys(tool: Tool | Unknown, path: str) -> Iterator[tuple[str, tuple[str | None, str]]]:
    """Yield the param path, and the namespace and name, of a tool or of each tool in a namespace."""
    if isinstance(tool, _NAMED_TYPES):
        yield f"{path}.name", (None, tool.name)
    elif isinstance(tool, NamespaceTool):
        for index, child in enumerate(tool.tools):
            if isinstance(child, _NAMED_TYPES):
                yield f"{path}.tools[{index}].name", (tool.name, child.name)
    elif isinstance(tool, McpTool):
        yield f"{path}.server_label", ("mcp", tool.server_label)
    elif tool.type in _UNNAMED_TYPES:  # tools of unknown types are not checked
        yield path, ("", tool.type)


def _check_tool_choice(
    request: CreateRequest,
    tools: Tools,
    capabilities: Capabilities,
    hosted_types: frozenset[str],
    reasons: Mapping[str, str],
) -> None:
    choice = request.tool_choice
    if choice == "required" and not tools:
        raise InvalidRequest(
            "'tool_choice' is 'required', but there are no tools.", param="tool_choice", code="invalid_value"
        )
    if choice is None or isinstance(choice, str) or (capabilities.any_tool and not _knows_all_tools(request, tools)):
        return
    if isinstance(choice, FunctionChoice | CustomChoice):
        _check_name(choice.name, tools, "tool_choice.name")
    elif isinstance(choice, AllowedToolsChoice):
        for index, allowed in enumerate(choice.tools):
            _check_allowed(allowed, tools, f"tool_choice.tools[{index}]", any_type=capabilities.any_tool)
    elif capabilities.any_tool:
        return
    elif isinstance(choice, Unknown) and choice.type not in hosted_types:  # its meaning is not known
        message = f"A choice of type '{choice.type}' is not supported by this server. {reasons.get(choice.type, '')}"
        raise UnsupportedTool(message.rstrip(), param="tool_choice")
    else:
        _check_type(choice.type, tools, "tool_choice")
        if isinstance(choice, McpChoice):
            _check_label(choice.server_label, tools)


def _knows_all_tools(request: CreateRequest, tools: Tools) -> bool:
    """Return True if these are all named tools, even on a backend that runs tools itself."""
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
    """Raise InvalidRequest unless one tool has this name. The namespace may be omitted if the name is unique."""
    found = {  # a set: the same tool may come with several turns
        key
        for tool in tools
        for _, key in _list_keys(tool, path)
        if key[1] == name and key[0] != "" and namespace in (None, key[0])
    }
    if not found:
        raise InvalidRequest(f"There is no tool named '{name}' in 'tools'.", param=path, code="invalid_value")
    if len(found) > 1 and (None, name) not in found:
        raise InvalidRequest(f"More than one namespace has a tool named '{name}'.", param=path, code="invalid_value")


def _check_label(label: str, tools: Tools) -> None:
    if label not in {tool.server_label for tool in tools if isinstance(tool, McpTool)}:
        raise InvalidRequest(
            f"There is no MCP server '{label}' in 'tools'.", param="tool_choice.server_label", code="invalid_value"
        )


def _check_type(kind: str, tools: Tools, path: str) -> None:
    if _TYPE_ALIASES.get(kind, kind) not in {_TYPE_ALIASES.get(tool.type, tool.type) for tool in tools}:
        raise UnsupportedTool(f"There is no tool of type '{kind}' in 'tools'.", param=path)
