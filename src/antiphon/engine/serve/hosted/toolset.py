"""The tools of the model calls of one response: the client's tools, and the functions of the hosted sessions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

from antiphon.engine.serve.tool_emulation.catalog import ToolKey, ToolNames
from antiphon.errors import InvalidRequest
from antiphon.protocol.hosted import AdditionalTools, McpCall, Program, ToolSearchOutput
from antiphon.protocol.items import Item
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import (
    AllowedToolsChoice,
    Caller,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    McpChoice,
    McpTool,
    NamespaceTool,
    Tool,
    ToolSearchTool,
)
from antiphon.protocol.unions import Unknown
from antiphon.tools.hosted.base import HostedFunction, HostedSession, HostedTool

# Choices that name a client's tool, or none.
_CLIENT_CHOICES = frozenset({"function", "custom", "allowed_tools"})
# Items whose type is not that of their tool.
_KINDS: dict[type, str] = {Program: "programmatic_tool_calling"}
_FOR_PROGRAMS = "The call was not carried out: only a program can call this tool (programmatic_tool_calling)."
_UNKNOWN = "The call was not carried out: there is no tool of this name."


class OpenSession(NamedTuple):
    """A session, its entry in the request, and the hosted tool that opened it."""

    entry: Tool | Unknown
    hosted: HostedTool
    session: HostedSession


class HostedToolset:
    """Names the functions of all sessions, and builds the request of each model call."""

    def __init__(
        self,
        request: CreateRequest,
        client_tools: Sequence[Tool | Unknown],
        items: Iterable[Item | Unknown] = (),
    ) -> None:
        self._request = request
        self.client_tools = list(client_tools)
        self._nested_only = {name for tool in client_tools for name in _list_nested_only(tool)}
        self._shown_tools = [shown for tool in client_tools if (shown := _hide_nested_only(tool)) is not None]
        self._sessions: list[OpenSession] = []
        self._names = ToolNames()
        self._taken = {name for tool in client_tools for name in _list_names(tool)}
        self._assigned: dict[tuple[int, str], str] = {}
        self._by_name: dict[str, tuple[HostedSession, str]] = {}
        self._by_namespace: dict[tuple[str, str], tuple[HostedSession, str]] = {}
        defined = [
            tool for item in items if isinstance(item, AdditionalTools | ToolSearchOutput) for tool in item.tools
        ]
        self._client_names = {name for tool in (*client_tools, *defined) for name in _list_client_names(tool)}
        self.has_search = any(isinstance(tool, ToolSearchTool) and tool.execution != "client" for tool in client_tools)
        for name in self._taken:
            self._names.reserve(ToolKey("named", None, name))

    def add(self, opened: OpenSession) -> None:
        self._sessions.append(opened)

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(self._sessions)

    def find(self, name: str, namespace: str | None = None) -> tuple[HostedSession, str] | None:
        """Return the session and its own name of a function that the model calls."""
        return self._by_name.get(name) if namespace is None else self._by_namespace.get((namespace, name))

    def find_refusal(self, name: str) -> str | None:
        """Return the reason if the model may not call a function that is not hosted. None: the client has it."""
        if name in self._nested_only:
            return _FOR_PROGRAMS
        return None if name in self._client_names else _UNKNOWN

    def list_callable_functions(self) -> list[tuple[str, OpenSession, HostedFunction]]:
        """Return the hosted functions that programs can call, with their names."""
        return [
            (self._assigned[index, function.name], opened, function)
            for index, opened in enumerate(self._sessions)
            if allows_caller(opened.entry, "programmatic")
            for function in opened.session.functions
            if (index, function.name) in self._assigned
        ]

    def get_function_name(self, name: str, namespace: str | None) -> str:
        """Return the name of a function in the context of the next model call."""
        return name if namespace is None else self._names.get_or_assign(ToolKey("named", namespace, name))

    def make_request(self, *, is_first: bool, max_tokens: int | None) -> CreateRequest:
        """Return the request of the next model call. A required call is required in the first round only."""
        self.assign_names()
        request = copy(self._request)
        functions = [tool for opened in self._sessions for tool in self._list_functions(opened)]
        request.tools = [*self._shown_tools, *functions] or None
        request.tool_choice = self._translate_choice(is_first=is_first) if request.tools else None
        request.max_output_tokens = max_tokens
        texts = [request.instructions, *(opened.session.instructions for opened in self._sessions)]
        request.instructions = "\n\n".join(text for text in texts if text) or None
        return request

    def get_call_name(self, item: Any) -> str:
        """Return the function name of a hosted item in the context."""
        if isinstance(item, McpCall):
            for index, opened in enumerate(self._sessions):
                if isinstance(opened.entry, McpTool) and opened.entry.server_label == item.server_label:
                    return self._assigned.get((index, item.name)) or self._names.get_or_assign(
                        ToolKey("named", None, item.name)
                    )
            return self._names.get_or_assign(ToolKey("named", None, item.name))
        kind = _KINDS.get(type(item)) or item.type.removesuffix("_call")
        for index, opened in enumerate(self._sessions):
            if (index, kind) in self._assigned and kind in opened.hosted.types:
                return self._assigned[index, kind]
        return self._names.get_or_assign(ToolKey(kind))

    # Names

    def assign_names(self) -> None:
        """Name the functions that have no name yet. A function keeps its own name unless another one has it."""
        new = [
            (index, opened.session, function)
            for index, opened in enumerate(self._sessions)
            for function in opened.session.functions
            if (index, function.name) not in self._assigned
        ]
        counts = Counter(function.name for _, _, function in new)
        for index, session, function in new:
            is_taken = function.name in self._taken or counts[function.name] > 1
            is_deferred = self._is_deferred(self._sessions[index])
            key = ToolKey("named", session.label if is_taken or is_deferred else None, function.name)
            name = self._names.get_or_assign(key)
            while name in self._by_name:  # two entries of one tool
                key = key._replace(namespace=f"{key.namespace}_{index}")
                name = self._names.get_or_assign(key)
            self._assigned[index, function.name] = name
            if not allows_caller(self._sessions[index].entry, "direct"):
                self._taken.add(name)
                self._nested_only.add(name)
                continue
            self._by_name[name] = session, function.name
            if is_deferred:
                self._by_namespace[session.label, function.name] = session, function.name
        self._taken |= set(self._by_name)

    def _is_deferred(self, opened: OpenSession) -> bool:
        """Return True if the model sees the functions only after a tool search."""
        return self.has_search and bool(getattr(opened.entry, "defer_loading", None))

    def _list_functions(self, opened: OpenSession) -> list[Tool]:
        if not allows_caller(opened.entry, "direct"):
            return []
        index = self._sessions.index(opened)
        functions = opened.session.functions
        if not self._is_deferred(opened):
            return [_make_function_tool(each, self._assigned[index, each.name]) for each in functions]
        description = getattr(opened.entry, "server_description", None) or f"The tools of {opened.session.label}."
        deferred: list[Tool | Unknown] = [
            FunctionTool(each.name, each.description, each.parameters, each.strict, defer_loading=True)
            for each in functions
        ]
        if not deferred and not opened.session.is_deferred:
            return []
        return [NamespaceTool(opened.session.label, description, deferred)]

    def can_defer(self, tool: Tool | Unknown) -> bool:
        """Return True if the model can find the functions of a tool by a search.

        A choice of the tool, or one that does not allow the search, needs its functions at once.
        """
        choice = self._request.tool_choice
        if not self.has_search or not isinstance(tool, McpTool):
            return self.has_search
        if isinstance(choice, AllowedToolsChoice):
            kinds = {entry.get("type") for entry in choice.tools}
            return "tool_search" in kinds or not any(_names_server(entry, tool) for entry in choice.tools)
        return not (isinstance(choice, McpChoice) and choice.server_label == tool.server_label)

    def list_unloaded(self) -> list[OpenSession]:
        """Return the sessions whose functions are loaded before the first tool search."""
        return [opened for opened in self._sessions if opened.session.is_deferred]

    def list_loaded(self, opened: OpenSession) -> list[Tool]:
        """Return the functions of a session that has been loaded, as a search finds them."""
        self.assign_names()
        return self._list_functions(opened)

    # The choice

    def _translate_choice(self, *, is_first: bool) -> Any:
        choice = self._request.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            tools = [
                each
                for index, entry in enumerate(choice.tools)
                for each in self._translate_allowed(entry, f"tool_choice.tools[{index}]", is_first=is_first)
            ]
            mode = "auto" if choice.mode == "required" and not is_first else choice.mode
            return AllowedToolsChoice(tools or [{"type": "function", "name": ""}], mode)
        if not is_first and choice not in (None, "auto", "none"):
            return None
        if choice is None or isinstance(choice, str) or choice.type in _CLIENT_CHOICES:
            return choice
        label, name = (choice.server_label, choice.name) if isinstance(choice, McpChoice) else (None, None)
        names = self._list_chosen(choice.type, label, name)
        if not names and label is not None and name is not None:
            self._check_name(label, name, "tool_choice")
        if not names:  # a client's tool, such as a shell
            return choice
        if len(names) == 1:
            return FunctionChoice(names[0])
        return AllowedToolsChoice([{"type": "function", "name": each} for each in names], "required")

    def _translate_allowed(self, entry: JsonObject, path: str, *, is_first: bool) -> list[JsonObject]:
        names = self._list_chosen_by(entry)
        label, name = entry.get("server_label"), entry.get("name")
        if names or entry.get("type") != "mcp" or not isinstance(label, str):
            return [{"type": "function", "name": name} for name in names] if names else [entry]
        if any(opened.session.is_deferred and _names_server(entry, opened.entry) for opened in self._sessions):
            # The functions get their names when a search loads them.
            if name is None:
                return [{"type": "namespace", "name": label}]
            return [{"type": "function", "name": name, "namespace": label}]
        if is_first and isinstance(name, str):
            self._check_name(label, name, path)
        return [entry]

    def _check_name(self, label: str, name: str, path: str) -> None:
        """Raise InvalidRequest if the server has been listed and does not offer the tool. `path` is of the choice."""
        for opened in self._sessions:
            offered = [function.name for function in opened.session.functions]
            # The model may not call tools that are for programs only, but the server offers them.
            if getattr(opened.entry, "server_label", None) == label and offered and name not in offered:
                raise InvalidRequest(
                    f"The MCP server '{label}' offers no tool '{name}'.", param=f"{path}.name", code="invalid_value"
                )

    def _list_chosen_by(self, entry: JsonObject) -> list[str]:
        kind = str(entry.get("type"))
        if kind in _CLIENT_CHOICES:
            return []
        return self._list_chosen(kind, entry.get("server_label"), entry.get("name"))

    def _list_chosen(self, kind: str, label: str | None, name: str | None) -> list[str]:
        """Return the names of the hosted functions that a choice means: of a type, a server, or one of its tools."""
        return [
            assigned
            for (index, own), assigned in self._assigned.items()
            if kind in self._sessions[index].hosted.types
            and allows_caller(self._sessions[index].entry, "direct")
            and label in (None, getattr(self._sessions[index].entry, "server_label", None))
            and name in (None, own)
        ]


def _names_server(entry: JsonObject, tool: Tool | Unknown) -> bool:
    """Return True if an entry of `allowed_tools` allows an MCP server, or one of its tools."""
    return entry.get("type") == "mcp" and entry.get("server_label") == getattr(tool, "server_label", None)


def allows_caller(tool: Tool | Unknown, caller: Caller) -> bool:
    """Return True if the model (`direct`) or a program may call the tool. By default, only the model may."""
    allowed: Sequence[Caller] | None = getattr(tool, "allowed_callers", None)
    return caller == "direct" if allowed is None else caller in allowed


def _hide_nested_only(tool: Tool | Unknown) -> Tool | Unknown | None:
    """Return the tool without functions that only programs may call; None if nothing is left."""
    if not isinstance(tool, NamespaceTool):
        return tool if allows_caller(tool, "direct") else None
    shown = [child for child in tool.tools if allows_caller(child, "direct")]
    if len(shown) == len(tool.tools):
        return tool
    return NamespaceTool(tool.name, tool.description, shown) if shown else None


def _list_nested_only(tool: Tool | Unknown) -> list[str]:
    if isinstance(tool, NamespaceTool):
        hidden = [child for child in tool.tools if not allows_caller(child, "direct")]
        return [f"{tool.name}__{child.name}" for child in hidden if isinstance(child, FunctionTool | CustomTool)]
    return [] if allows_caller(tool, "direct") else _list_names(tool)


def _make_function_tool(function: HostedFunction, name: str) -> FunctionTool:
    return FunctionTool(name, function.description, function.parameters, function.strict)


def _list_client_names(tool: Tool | Unknown) -> list[str]:
    """Return the names with which the model may call a client's tool. Some models omit the namespace."""
    children = tool.tools if isinstance(tool, NamespaceTool) else ()
    return [*_list_names(tool), *(name for child in children for name in _list_names(child))]


def _list_names(tool: Tool | Unknown) -> list[str]:
    """Return the names that the tools of a client have for a model."""
    if isinstance(tool, FunctionTool | CustomTool):
        return [tool.name]
    if isinstance(tool, NamespaceTool):
        return [f"{tool.name}__{child.name}" for child in tool.tools if isinstance(child, FunctionTool | CustomTool)]
    return [tool.type]
