"""All tools of a turn, in one list: namespaces opened, deferred ones marked, each with the name the backend sees."""

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

LONGEST = 64
_ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")


class ToolKey(NamedTuple):
    """What tells a tool from all others. `kind` is `named` for functions and custom tools, else the tool's type."""

    kind: str
    namespace: str | None = None
    name: str = ""


# Tools have one name as a tool, and may have another as a choice.
_COMPUTERS = frozenset({"computer", "computer_use", "computer_use_preview"})


def make_type_key(kind: str) -> ToolKey:
    """The one tool of a type that has no names."""
    return ToolKey("computer" if kind in _COMPUTERS else kind)


class ToolNames:
    """Gives each tool a name that every chat API takes; the same tools get the same names, turn after turn."""

    def __init__(self) -> None:
        self._given: dict[ToolKey, str] = {}
        self._bearers: dict[str, ToolKey] = {}

    def keep(self, identity: ToolKey) -> str:
        """A function's own name stays as it is, whatever it looks like."""
        return self._give(identity, identity.name)

    def give(self, identity: ToolKey) -> str:
        """The name of this tool: the first one who asks for a name has it."""
        known = self._given.get(identity)
        if known is not None:
            return known
        wanted = _spell(identity)
        name = wanted if _is_legal(wanted) else _shorten(identity, 0)
        attempt = 0
        while name in self._bearers:
            name = _shorten(identity, attempt)
            attempt += 1
        return self._give(identity, name)

    def _give(self, identity: ToolKey, name: str) -> str:
        self._given[identity] = name
        self._bearers[name] = identity
        return name


def _spell(identity: ToolKey) -> str:
    if identity.kind != "named":
        return identity.kind
    return identity.name if identity.namespace is None else f"{identity.namespace}__{identity.name}"


def _is_legal(name: str) -> bool:
    return 0 < len(name) <= LONGEST and _ILLEGAL.search(name) is None


def _shorten(identity: ToolKey, attempt: int) -> str:
    """A name that says what it can of the tool, and has a mark that no other tool's name has."""
    told = "\0".join([identity.kind, identity.namespace or "", identity.name, str(attempt)])
    mark = hashlib.sha256(told.encode(errors="surrogatepass")).hexdigest()[:8]
    readable = _ILLEGAL.sub("_", _spell(identity))
    return f"{readable[: LONGEST - len(mark) - 1]}_{mark}"


# Tools that can be shown as functions. A namespace is not among them: it is opened.
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


class CatalogEntry(msgspec.Struct):
    """A tool, the namespace it stands in, and the name it has for the backend."""

    identity: ToolKey
    tool: Tool
    name: str
    namespace: NamespaceTool | None = None
    loaded: bool = True


class Catalog:
    """The tools of the request and those that came with its items; `native` are the types the backend takes itself."""

    def __init__(
        self, tools: Sequence[Tool | Unknown], items: Iterable[Item | Unknown], native: frozenset[str]
    ) -> None:
        self._native = native
        self._names = ToolNames()
        self._entries: dict[ToolKey, CatalogEntry] = {}
        self._by_name: dict[str, CatalogEntry] = {}
        self._bare: dict[str, list[CatalogEntry]] = {}
        # Those of a type that only the backend knows: what they are, and how they are called, is between it and them.
        self._others = [tool for tool in tools if tool.type in native - EMULATED_TYPES]
        brought = [(item, item.tools) for item in items if isinstance(item, AdditionalTools | ToolSearchOutput)]
        everything = [*tools, *(tool for _, each in brought for tool in each)]
        for tool in everything:
            if isinstance(tool, FunctionTool):  # first of all: these keep their names
                self._names.keep(ToolKey("named", None, tool.name))
        self.search = next((tool for tool in everything if isinstance(tool, ToolSearchTool)), None)
        for tool in tools:
            self._add(tool, loaded=False)
        for item, each in brought:
            for tool in each:
                self._add(tool, loaded=isinstance(item, ToolSearchOutput))

    def _add(self, tool: Tool | Unknown, *, loaded: bool) -> None:
        for namespace, each in _open(tool):
            identity = make_tool_key(each, namespace.name if namespace is not None else None)
            if identity in self._entries:
                self._entries[identity].loaded |= loaded
                continue
            shown = loaded or self.search is None or not getattr(each, "defer_loading", None)
            entry = CatalogEntry(identity, each, self._names.give(identity), namespace, shown)
            self._entries[identity] = self._by_name[entry.name] = entry
            if namespace is not None:
                self._bare.setdefault(identity.name, []).append(entry)

    def name_of(self, identity: ToolKey) -> str:
        """What the backend calls this tool; one that is no longer offered still has its name."""
        if identity.namespace == identity.name and identity not in self._entries:
            return identity.name  # a deferred function: see `address`
        return self._names.give(identity)

    def address(self, entry: CatalogEntry) -> tuple[str, str | None]:
        """The name and the namespace by which the client knows the tool.

        A function that the server's search has loaded comes as a namespace of its own: so the API has it, and clients
        tell by it that it was not there from the first.
        """
        name, namespace = entry.identity.name, entry.identity.namespace
        was_deferred = (
            namespace is None and entry.tool.type == "function" and getattr(entry.tool, "defer_loading", None)
        )
        if was_deferred and self.search is not None and self.search.execution != "client":
            return name, name
        return name, namespace

    def find(self, name: str) -> CatalogEntry | None:
        """The tool that a model means by this name: some leave the namespace away."""
        entry = self._by_name.get(name)
        if entry is None:
            children = self._bare.get(name, ())
            entry = children[0] if len(children) == 1 else None
        return entry

    def get(self, identity: ToolKey) -> CatalogEntry | None:
        return self._entries.get(identity)

    def __iter__(self) -> Iterator[CatalogEntry]:
        return iter(self._entries.values())

    def is_native(self, entry: CatalogEntry) -> bool:
        return entry.tool.type in self._native

    def show(self, allowed: frozenset[str] | None = None) -> list[Tool | Unknown]:
        """The tools as the backend takes them: those that are loaded, and no others than those allowed."""
        shown: list[Tool | Unknown] = []
        namespaces: set[str | None] = {None}
        for entry in self:
            if entry.loaded and (allowed is None or entry.name in allowed) and self._is_useful(entry):
                tool = self._show(entry)
                if entry.identity.namespace not in namespaces:
                    tool = _introduce(tool, entry.namespace)
                namespaces.add(entry.identity.namespace)
                shown.append(tool)
        return shown + [tool for tool in self._others if allowed is None or tool.type in allowed]

    def _show(self, entry: CatalogEntry) -> Tool:
        tool = entry.tool
        if not self.is_native(entry):
            return make_function_tool(self._invite(tool) if isinstance(tool, ToolSearchTool) else tool, entry.name)
        if isinstance(tool, FunctionTool | CustomTool) and tool.name != entry.name:
            return msgspec.structs.replace(tool, name=entry.name)
        return tool

    def _is_useful(self, entry: CatalogEntry) -> bool:
        """There must be something to search for, unless it is the client who knows what there is."""
        tool = entry.tool
        return not isinstance(tool, ToolSearchTool) or tool.execution == "client" or any(self.hidden())

    def hidden(self) -> Iterator[CatalogEntry]:
        """The tools that wait to be found."""
        return (entry for entry in self if not entry.loaded)

    def _invite(self, tool: ToolSearchTool) -> ToolSearchTool:
        """The search with a list of what it can find, for otherwise nobody would look for it."""
        if tool.execution == "client":
            return tool
        listed: dict[str, None] = {}
        for entry in self.hidden():
            about = entry.namespace or entry.tool
            listed[f"- {getattr(about, 'name', '')}: {_first_line(getattr(about, 'description', None))}"] = None
        told = "Finds tools by words and loads them, so that they can be called. These wait to be loaded:\n"
        return msgspec.structs.replace(tool, description=told + "\n".join(listed), parameters=None)


def make_tool_key(tool: Tool, namespace: str | None) -> ToolKey:
    if isinstance(tool, FunctionTool | CustomTool):
        return ToolKey("named", namespace, tool.name)
    return make_type_key(tool.type)


def _open(tool: Tool | Unknown) -> Iterator[tuple[NamespaceTool | None, Tool]]:
    if isinstance(tool, NamespaceTool):
        for child in tool.tools:
            if isinstance(child, FunctionTool | CustomTool):
                yield tool, child
    elif not isinstance(tool, Unknown) and tool.type in EMULATED_TYPES:
        yield None, tool


def _introduce(tool: Tool, namespace: NamespaceTool | None) -> Tool:
    """What a namespace says of itself, its first tool says: told with each of them, it would take a lot of room."""
    if namespace is None or not namespace.description or not isinstance(tool, FunctionTool | CustomTool):
        return tool
    told = f"{tool.description or ''}\n\nAll tools of {namespace.name}: {namespace.description}".strip()
    return msgspec.structs.replace(tool, description=told)


_LONGEST_LINE = 160


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0][:_LONGEST_LINE]
