"""Checks of the grammars of custom tools, before any of them is compiled in this process."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from antiphon.config.settings import GrammarLimits
from antiphon.errors import InvalidRequest
from antiphon.protocol.hosted import AdditionalTools, ToolSearchOutput
from antiphon.protocol.items import Item
from antiphon.protocol.tool_lists import derive
from antiphon.protocol.tools import CustomTool, GrammarInput, NamespaceTool, Tool
from antiphon.protocol.unions import Unknown

if TYPE_CHECKING:
    from antiphon.grammars.trial import GrammarTrial

# A tool with a grammar and its param path.
_Found = tuple[str, CustomTool]
_ITEMS_WITH_TOOLS = frozenset({AdditionalTools, ToolSearchOutput})


class GrammarCheck:
    """Checks grammars against the limits, and compiles each new one on trial in a process of its own."""

    def __init__(self, limits: GrammarLimits | None = None) -> None:
        self._limits = limits or GrammarLimits()
        self._trial: GrammarTrial | None = None

    async def close(self) -> None:
        if self._trial is not None:
            await self._trial.close()

    async def check_tools(self, tools: list[Tool | Unknown], *, project: str) -> None:
        """Raise InvalidRequest if the grammar of one of a request's tools cannot be used."""
        await self._check(_list_grammars(tools), project)

    async def check_items(self, items: Sequence[Item | Unknown], *, project: str) -> None:
        """Raise InvalidRequest if the grammar of a tool of an input item cannot be used."""
        for index, item in enumerate(items):
            if isinstance(item, AdditionalTools | ToolSearchOutput):
                await self._check(_find_grammars(item.tools, f"input[{index}].tools"), project)

    async def _check(self, found: Iterable[_Found], project: str) -> None:
        # Few requests have a grammar, and these modules take a megabyte.
        from antiphon.grammars.definitions import check_definition
        from antiphon.grammars.trial import GrammarTrial

        if self._trial is None:
            self._trial = GrammarTrial()
        for path, tool in found:
            assert isinstance(tool.format, GrammarInput)
            syntax, definition = tool.format.syntax, tool.format.definition
            param = f"{path}.format.definition"
            check_definition(syntax, definition, self._limits, param=param)
            fault = await self._trial.find_fault(syntax, definition, self._limits, project=project)
            if fault is not None:
                raise InvalidRequest(
                    f"The grammar of the tool '{tool.name}' cannot be read: {fault}", param=param, code="invalid_value"
                )


def have_grammars(tools: list[Tool | Unknown] | None) -> bool:
    """Return True if one of a request's tools has a grammar."""
    return bool(tools and _list_grammars(tools))


def have_tools(items: Sequence[Item | Unknown]) -> bool:
    """Return True if one of the input items has tools."""
    return not _ITEMS_WITH_TOOLS.isdisjoint(map(type, items))


def _list_grammars(tools: list[Tool | Unknown]) -> list[_Found]:
    return derive(tools, ("list_grammars",), lambda tools: list(_find_grammars(tools, "tools")))


def _find_grammars(tools: Sequence[Tool | Unknown], path: str) -> Iterator[_Found]:
    for index, tool in enumerate(tools):
        if isinstance(tool, CustomTool):
            if isinstance(tool.format, GrammarInput):
                yield f"{path}[{index}]", tool
        elif isinstance(tool, NamespaceTool):
            yield from _find_grammars(tool.tools, f"{path}[{index}].tools")
