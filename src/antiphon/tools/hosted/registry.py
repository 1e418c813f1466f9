"""Hosted tools, from the entry points of installed packages.

A package registers a tool in the group `antiphon.hosted_tools`: any name, and a factory that is called with a
`HostedSetup` and returns a `HostedTool`, or raises `HostedUnavailable`. Antiphon registers its own tools in the same
way.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack

from antiphon.entry_points import EntryPoint, find_entry_points
from antiphon.errors import ConfigError
from antiphon.tools.hosted.base import HostedSetup, HostedTool, HostedUnavailable

GROUP = "antiphon.hosted_tools"

Factory = Callable[[HostedSetup], HostedTool]

logger = logging.getLogger(__name__)


class HostedTools:
    """The hosted tools of a server, by the tool types they serve.

    `unavailable` has the reason for each type whose tool is installed but cannot run.
    """

    def __init__(self, tools: Iterable[HostedTool] = (), unavailable: Mapping[str, str] | None = None) -> None:
        self._tools = tuple(tools)
        self._by_type: dict[str, HostedTool] = {}
        for tool in self._tools:
            for kind in tool.types:
                if kind in self._by_type:
                    raise ConfigError(f"Two hosted tools serve the type '{kind}'. Remove one of their packages.")
                self._by_type[kind] = tool
        self.types = frozenset(self._by_type)
        self.unavailable = {kind: text for kind, text in (unavailable or {}).items() if kind not in self.types}

    def find(self, kind: str) -> HostedTool | None:
        """Return the tool that serves a type."""
        return self._by_type.get(kind)

    async def start(self) -> None:
        """Start all tools. If one fails, close those that have started."""
        async with AsyncExitStack() as stack:
            for tool in self._tools:
                await tool.start()
                stack.push_async_callback(tool.close)
            stack.pop_all()

    async def close(self) -> None:
        async with AsyncExitStack() as stack:  # closes the others even if one fails
            for tool in self._tools:
                stack.push_async_callback(tool.close)


NO_HOSTED_TOOLS = HostedTools()


def create_hosted_tools(setup: HostedSetup) -> HostedTools:
    """Create all installed hosted tools that can run with these settings."""
    tools: list[HostedTool] = []
    unavailable: dict[str, str] = {}
    for entry in sorted(find_entry_points(GROUP)):
        try:
            tools.append(_load(entry)(setup))
        except HostedUnavailable as reason:
            unavailable |= dict.fromkeys(reason.types, reason.message)
    return HostedTools(tools, unavailable)


def _load(entry: EntryPoint) -> Factory:
    # The import runs third-party code, which may raise anything. The error names the package.
    where = f"the hosted tool {entry.name} = {entry.value!r}"
    try:
        factory = entry.load()
    except Exception as error:
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise ConfigError(f"{where} cannot be loaded: it is not callable")
    create_tool: Factory = factory
    return create_tool
