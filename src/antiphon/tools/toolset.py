"""Sets of tools: combined, filtered, renamed, with approval, or chosen for each turn.

    tools = Toolset(weather, McpServer.stdio("files")).filter(["read_file"]).prefix("files_")
    Agent(..., tools=[get_weather, tools])

Tools that a server runs (`ServerTool`) can be in a set. They have no name and no approval in the agent, so only
`filter` with a function applies to them.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from antiphon.callbacks import call_callback
from antiphon.errors import ConfigError
from antiphon.tools.base import RunContext, Tool
from antiphon.tools.native import NativeTool
from antiphon.tools.server_tools import ServerTool

AnyTool: TypeAlias = Tool | ServerTool


@runtime_checkable
class ToolSource(Protocol):
    """A set of tools whose content is known when a turn begins: a `Toolset`, or an `McpServer`."""

    async def load_tools(self, context: RunContext[Any]) -> Sequence[AnyTool]:
        """Return the tools for the next turn."""


Member: TypeAlias = AnyTool | ToolSource
MakeTools: TypeAlias = Callable[[RunContext[Any]], Iterable[Member] | Awaitable[Iterable[Member]]]
Change: TypeAlias = Callable[[AnyTool], AnyTool | None]
"""Returns a tool of a set as it is in another set; None if it is not in it."""


class Toolset:
    """Tools, and sets of tools, as one set. All methods return a new set."""

    def __init__(self, *members: Member) -> None:
        """Raises ConfigError for a member that is neither a tool nor a set of tools."""
        self._members = check_members(members)
        self._make: MakeTools | None = None
        self._changes: tuple[Change, ...] = ()

    @classmethod
    def dynamic(cls, make: MakeTools) -> "Toolset":
        """Return a set that a function of the run's context makes before every turn."""
        if not callable(make):
            raise ConfigError(f"dynamic: expected a function, got {type(make).__name__}.")
        made = cls()
        made._make = make
        return made

    def __add__(self, other: Member) -> "Toolset":
        return Toolset(self, other)

    def filter(self, wanted: Collection[str] | Callable[[AnyTool], bool]) -> "Toolset":
        """Return the tools of these names, or those for which the function returns True."""
        if callable(wanted):
            is_wanted = wanted
            return self._change(lambda tool: tool if is_wanted(tool) else None)
        if isinstance(wanted, str):
            raise ConfigError("filter: expected names of tools or a function, got a string.")
        names = frozenset(wanted)
        self._check_names(names)
        return self._change(lambda tool: tool if isinstance(tool, ServerTool) or tool.name in names else None)

    def rename(self, names: Mapping[str, str]) -> "Toolset":
        """Return the tools with other names: `{"old": "new"}`."""
        self._check_names(names)
        return self._change(lambda tool: _rename(tool, lambda name: names.get(name, name)))

    def prefix(self, prefix: str) -> "Toolset":
        """Return the tools with a prefix before their names."""
        return self._change(lambda tool: _rename(tool, lambda name: f"{prefix}{name}"))

    def require_approval(self, when: Callable[[Mapping[str, Any]], bool] | None = None) -> "Toolset":
        """Return the tools with approval of their calls: of all, or as a function of the arguments decides.

        Calls that need approval already still need it.
        Raises ConfigError for tools that the server runs: their calls never reach the agent.
        """
        return self._change(lambda tool: _require_approval(tool, when))

    @property
    def is_fixed(self) -> bool:
        """True if the tools do not depend on the run."""
        return self._make is None and not any(_is_changing(member) for member in self._members)

    def list_tools(self) -> list[AnyTool]:
        """Return the tools. Only a set that `is_fixed` has them before a run."""
        return self._apply(list_fixed(self._members))

    async def load_tools(self, context: RunContext[Any]) -> list[AnyTool]:
        """Return the tools for the next turn. Raises ConfigError for a member that is not a tool."""
        members = self._members
        if self._make is not None:
            members = check_members(await call_callback(self._make, context))
        return self._apply(await load_all(members, context))

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise ConfigError for the name of a missing tool, if the tools are known already."""
        if not self.is_fixed:
            return
        known = [tool.name for tool in list_own(self.list_tools())]
        missing = sorted(set(names) - set(known))
        if missing:
            raise ConfigError(f"There is no tool '{missing[0]}' in the set. It has: {', '.join(known) or 'none'}.")

    def _change(self, change: Change) -> "Toolset":
        changed = Toolset(*self._members)
        changed._make = self._make
        changed._changes = (*self._changes, change)
        if changed.is_fixed:
            # An error is raised here, not in a run.
            changed.list_tools()
        return changed

    def _apply(self, tools: Iterable[AnyTool]) -> list[AnyTool]:
        applied = list(tools)
        for change in self._changes:
            applied = [changed for tool in applied if (changed := change(tool)) is not None]
        return applied


def check_members(members: Any) -> tuple[Member, ...]:
    """Return tools and sets of tools. Raises ConfigError for anything else."""
    if isinstance(members, str | Mapping) or not isinstance(members, Iterable):
        raise ConfigError(f"tools: expected a list of tools, got {type(members).__name__}.")
    checked = tuple(members)
    for each in checked:
        if not isinstance(each, Tool | ServerTool | ToolSource):
            name = getattr(each, "__name__", repr(each))
            if hasattr(each, "as_tool"):
                raise ConfigError("tools: an agent is not a tool. Use its as_tool(name, description), or a handoff.")
            raise ConfigError(f"{name} is not a tool: decorate it with @tool.")
    return checked


def is_fixed(members: Iterable[Member]) -> bool:
    """Return True if the tools do not depend on the run."""
    return not any(_is_changing(each) for each in members)


def list_fixed(members: Iterable[Member]) -> list[AnyTool]:
    """Return the tools of members that are fixed."""
    tools: list[AnyTool] = []
    for each in members:
        if isinstance(each, Tool | ServerTool):
            tools.append(each)
        elif isinstance(each, Toolset):
            tools += each.list_tools()
    return tools


def list_own(tools: Iterable[AnyTool]) -> list[Tool]:
    """Return the tools that the agent runs, not those of the server."""
    return [each for each in tools if isinstance(each, Tool)]


async def load_all(members: Iterable[Member], context: RunContext[Any]) -> list[AnyTool]:
    """Return the tools of all members for the next turn."""
    tools: list[AnyTool] = []
    for each in members:
        if isinstance(each, Tool | ServerTool):
            tools.append(each)
        else:
            tools += await each.load_tools(context)
    return tools


def _is_changing(member: Member) -> bool:
    if isinstance(member, Tool | ServerTool):
        return False
    return not (isinstance(member, Toolset) and member.is_fixed)


def _rename(tool: AnyTool, change: Callable[[str], str]) -> AnyTool:
    # The model knows native tools by their types, and the server runs its own tools.
    if isinstance(tool, ServerTool | NativeTool):
        return tool
    return msgspec.structs.replace(tool, name=change(tool.name))


def _require_approval(tool: AnyTool, when: Callable[[Mapping[str, Any]], bool] | None) -> AnyTool:
    if isinstance(tool, ServerTool):
        raise ConfigError(f"require_approval: the server runs the tool '{tool.type}', so the agent cannot ask for it.")
    before = tool.needs_approval
    if when is None or before is True:
        return msgspec.structs.replace(tool, needs_approval=True)
    rules = [when, before] if callable(before) else [when]
    return msgspec.structs.replace(tool, needs_approval=lambda arguments: any(rule(arguments) for rule in rules))
