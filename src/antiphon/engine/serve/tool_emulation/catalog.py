"""The catalog of a turn's tools: namespaces flattened, deferred tools marked, each with its name for the backend."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from antiphon.engine.serve.tool_emulation.client_tools import make_function_tool
from antiphon.protocol.hosted import AdditionalTools, ToolSearchOutput
from antiphon.protocol.items import Item
from antiphon.protocol.tools import CustomTool, FunctionTool, NamespaceTool, Tool, ToolSearchTool
from antiphon.protocol.unions import Unknown

MAX_NAME_LENGTH = 64
_MAX_DESCRIPTION_LINE = 160
_ILLEGAL_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
# Characters between the parts of a name. Letters of other scripts are not separators.
_SEPARATORS = re.compile(r"[\W_]+")
# A computer tool has one type as a tool and may have another in `tool_choice`.
_COMPUTER_TYPES = frozenset({"computer", "computer_use", "computer_use_preview"})
# Tool types that are emulated by functions. A namespace is not among them: its tools are listed instead.
EMULATED_TYPES = frozenset(
    {
        "function",
        "custom",
        "tool_search",
        "local_shell",
        "shell",
        "apply_patch",
        "computer",
        "computer_use_preview",
    }
)


class ToolKey(NamedTuple):
    """The key that identifies a tool. `kind` is `named` for functions and custom tools, else the tool's type."""

    kind: str
    namespace: str | None = None
    name: str = ""


def make_type_key(kind: str) -> ToolKey:
    """Return the key of a tool type without names, of which a request has at most one tool."""
    return ToolKey("computer" if kind in _COMPUTER_TYPES else kind)


class ToolNames:
    """Gives each tool a name that every chat API accepts. The same tools get the same names in every turn."""

    def __init__(self) -> None:
        self._names: dict[ToolKey, str] = {}
        self._taken: set[str] = set()

    def reserve(self, key: ToolKey) -> str:
        """Give a function its own name, even if it has illegal characters."""
        return self._assign(key, key.name)

    def get_or_assign(self, key: ToolKey) -> str:
        """Return the tool's name. Assign one at the first call: a name goes to the first tool that needs it."""
        known = self._names.get(key)
        if known is not None:
            return known
        wanted = _make_full_name(key)
        name = wanted if is_legal_name(wanted) else _make_short_name(key, 0)
        attempt = 0
        while name in self._taken:
            name = _make_short_name(key, attempt)
            attempt += 1
        return self._assign(key, name)

    def _assign(self, key: ToolKey, name: str) -> str:
        self._names[key] = name
        self._taken.add(name)
        return name


def _make_full_name(key: ToolKey) -> str:
    if key.kind != "named":
        return key.kind
    return key.name if key.namespace is None else f"{key.namespace}__{key.name}"


def is_legal_name(name: str) -> bool:
    """Return True if every chat API accepts the name of a function."""
    return 0 < len(name) <= MAX_NAME_LENGTH and _ILLEGAL_CHARACTER.search(name) is None


def _fold_separators(name: str) -> str:
    return _SEPARATORS.sub("_", name)


def _make_short_name(key: ToolKey, attempt: int) -> str:
    """Return a legal name: the readable part of the full name and a hash of the key."""
    text = "\0".join([key.kind, key.namespace or "", key.name, str(attempt)])
    suffix = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    readable = _ILLEGAL_CHARACTER.sub("_", _make_full_name(key))
    return f"{readable[: MAX_NAME_LENGTH - len(suffix) - 1]}_{suffix}"


class CatalogEntry(msgspec.Struct):
    """A tool, its namespace, and its name for the backend. A tool that is not loaded is not shown to the model yet."""

    key: ToolKey
    tool: Tool
    name: str
    namespace: NamespaceTool | None = None
    loaded: bool = True


class Catalog:
    """The tools of the request and of its items. `native` are the tool types that the backend supports itself."""

    def __init__(
        self, tools: Sequence[Tool | Unknown], items: Iterable[Item | Unknown], native: frozenset[str]
    ) -> None:
        self._native = native
        self._names = ToolNames()
        self._entries: dict[ToolKey, CatalogEntry] = {}
        self._by_name: dict[str, CatalogEntry] = {}
        self._by_child_name: dict[str, list[CatalogEntry]] = {}
        # Tool types that only the backend knows are passed on unchanged.
        self._native_only = [tool for tool in tools if tool.type in native - EMULATED_TYPES]
        items_with_tools = [item for item in items if isinstance(item, AdditionalTools | ToolSearchOutput)]
        all_tools = [*tools, *(tool for item in items_with_tools for tool in item.tools)]
        for tool in all_tools:
            if isinstance(tool, FunctionTool):  # first of all, because functions have their own names
                self._names.reserve(ToolKey("named", None, tool.name))
        self._sources: list[NamespaceTool] = []
        self.search = next((tool for tool in all_tools if isinstance(tool, ToolSearchTool)), None)
        for tool in tools:
            self._add(tool, loaded=False)
        for item in items_with_tools:
            for tool in item.tools:
                self._add(tool, loaded=isinstance(item, ToolSearchOutput))

    def _add(self, tool: Tool | Unknown, *, loaded: bool) -> None:
        for namespace, each in _list_tools(tool):
            key = make_tool_key(each, namespace.name if namespace is not None else None)
            if key in self._entries:
                self._entries[key].loaded |= loaded
                continue
            is_loaded = loaded or self.search is None or not getattr(each, "defer_loading", None)
            entry = CatalogEntry(key, each, self._names.get_or_assign(key), namespace, is_loaded)
            self._entries[key] = self._by_name[entry.name] = entry
            if namespace is not None:
                self._by_child_name.setdefault(key.name, []).append(entry)

    def get_backend_name(self, key: ToolKey) -> str:
        """Return the tool's name for the backend, even for a tool that is no longer in the catalog."""
        if key.namespace == key.name and key not in self._entries:
            return key.name  # a deferred function: see `get_client_name`
        return self._names.get_or_assign(key)

    def get_client_name(self, entry: CatalogEntry) -> tuple[str, str | None]:
        """Return the name and the namespace of the tool for the client.

        The API reports a deferred function that the server's search loaded with its own name as its namespace.
        Clients recognise loaded functions by that.
        """
        name, namespace = entry.key.name, entry.key.namespace
        was_deferred = (
            namespace is None and entry.tool.type == "function" and getattr(entry.tool, "defer_loading", None)
        )
        if was_deferred and self.search is not None and self.search.execution != "client":
            return name, name
        return name, namespace

    def find(self, name: str) -> CatalogEntry | None:
        """Return the tool with this backend name, or the only one that a model can mean by it.

        Some models omit the namespace, or separate it by other characters: `fs.read` instead of `fs__read`.
        """
        entry = self._by_name.get(name)
        if entry is not None:
            return entry
        candidates = self._by_child_name.get(name)
        if candidates is None:
            folded = _fold_separators(name)
            candidates = [each for each in self if _fold_separators(each.name) == folded]
        return candidates[0] if len(candidates) == 1 else None

    def get(self, key: ToolKey) -> CatalogEntry | None:
        return self._entries.get(key)

    def __iter__(self) -> Iterator[CatalogEntry]:
        return iter(self._entries.values())

    def is_native(self, entry: CatalogEntry) -> bool:
        return entry.tool.type in self._native

    def list_backend_tools(self, allowed: frozenset[str] | None = None) -> list[Tool | Unknown]:
        """Return the loaded tools in the form that the backend accepts. `allowed` are backend names; None is all."""
        shown: list[Tool | Unknown] = []
        namespaces: set[str | None] = {None}
        for entry in self:
            if entry.loaded and (allowed is None or entry.name in allowed) and self._is_useful(entry):
                tool = self._make_backend_tool(entry)
                if entry.key.namespace not in namespaces:
                    tool = _add_namespace_description(tool, entry.namespace)
                namespaces.add(entry.key.namespace)
                shown.append(tool)
        return shown + [tool for tool in self._native_only if allowed is None or tool.type in allowed]

    def _make_backend_tool(self, entry: CatalogEntry) -> Tool:
        tool = entry.tool
        if not self.is_native(entry):
            emulated = self._describe_search(tool) if isinstance(tool, ToolSearchTool) else tool
            return make_function_tool(emulated, entry.name)
        if isinstance(tool, FunctionTool | CustomTool) and tool.name != entry.name:
            return msgspec.structs.replace(tool, name=entry.name)
        return tool

    def _is_useful(self, entry: CatalogEntry) -> bool:
        """Return False for a server-side search without deferred tools to find."""
        tool = entry.tool
        if not isinstance(tool, ToolSearchTool) or tool.execution == "client":
            return True
        return bool(self._sources) or any(self.list_deferred())

    def set_sources(self, tools: Iterable[Tool | Unknown]) -> None:
        """Set the namespaces whose tools are loaded before the first search: those without tools."""
        self._sources = [tool for tool in tools if isinstance(tool, NamespaceTool) and not tool.tools]

    def add_sources(self, tools: Iterable[Tool | Unknown]) -> None:
        """Add the tools of these namespaces. A search can find them."""
        self._sources = []
        for tool in tools:
            self._add(tool, loaded=False)

    def list_deferred(self) -> Iterator[CatalogEntry]:
        """Yield the tools that a search can still load."""
        return (entry for entry in self if not entry.loaded)

    def _describe_search(self, tool: ToolSearchTool) -> ToolSearchTool:
        """Add the list of deferred tools to the search's description: without it, models do not search."""
        if tool.execution == "client":
            return tool
        lines: dict[str, None] = {}
        for listed in (*self._sources, *(entry.namespace or entry.tool for entry in self.list_deferred())):
            lines[f"- {getattr(listed, 'name', '')}: {_first_line(getattr(listed, 'description', None))}"] = None
        heading = "Finds tools by words and loads them, so that they can be called. These wait to be loaded:\n"
        return msgspec.structs.replace(tool, description=heading + "\n".join(lines), parameters=None)


def make_tool_key(tool: Tool, namespace: str | None) -> ToolKey:
    if isinstance(tool, FunctionTool | CustomTool):
        return ToolKey("named", namespace, tool.name)
    return make_type_key(tool.type)


def _list_tools(tool: Tool | Unknown) -> Iterator[tuple[NamespaceTool | None, Tool]]:
    """Yield a tool, or each tool of a namespace with the namespace."""
    if isinstance(tool, NamespaceTool):
        for child in tool.tools:
            if isinstance(child, FunctionTool | CustomTool):
                yield tool, child
    elif not isinstance(tool, Unknown) and tool.type in EMULATED_TYPES:
        yield None, tool


def _add_namespace_description(tool: Tool, namespace: NamespaceTool | None) -> Tool:
    """Append the namespace's description to its first tool's. In every tool it would cost too many tokens."""
    if namespace is None or not namespace.description or not isinstance(tool, FunctionTool | CustomTool):
        return tool
    description = f"{tool.description or ''}\n\nAll tools of {namespace.name}: {namespace.description}".strip()
    return msgspec.structs.replace(tool, description=description)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0][:_MAX_DESCRIPTION_LINE]
