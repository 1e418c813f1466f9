"""The one place where tools are called: whatever happens in one is its result, and never the end of a run."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

import msgspec

from antiphon.errors import ConfigError
from antiphon.tools.base import Call, Tool, ToolContext, ToolResult

logger = logging.getLogger(__name__)


class Executor:
    """Calls tools by name, each within its own limits. `unknown` is what a model reads that calls one that is none."""

    def __init__(self, tools: Iterable[Tool], *, unknown: str | None = None) -> None:
        self.tools: Mapping[str, Tool] = _by_name(tools)
        self._unknown = unknown
        self._slots = {
            tool.name: asyncio.Semaphore(tool.concurrency) for tool in self.tools.values() if tool.concurrency
        }

    async def execute(self, call: Call, context: ToolContext) -> ToolResult:
        """The result of a call. Only cancelling gets out of here as an exception."""
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return fail(self._unknown or f"There is no tool '{call.name}'. There are: {known}.")
        slot = self._slots.get(tool.name)
        if slot is None:
            return await _attempt(tool, call, context)
        async with slot:
            return await _attempt(tool, call, context)


def _by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise ConfigError(f"There are two tools called '{tool.name}'.")
        named[tool.name] = tool
    return named


async def _attempt(tool: Tool, call: Call, context: ToolContext) -> ToolResult:
    result = await _invoke(tool, call, context)
    for _ in range(tool.retries):
        if not result.is_error:
            break
        result = await _invoke(tool, call, context)
    return result


async def _invoke(tool: Tool, call: Call, context: ToolContext) -> ToolResult:
    limit = asyncio.timeout(tool.timeout)
    try:
        async with limit:
            return await tool.invoke(call.arguments, context)
    except TimeoutError as error:
        if limit.expired():
            return fail(f"The tool took longer than {tool.timeout:g} seconds and was stopped.")
        return _describe(tool, error)
    except msgspec.ValidationError as error:
        return fail(f"The arguments do not fit the schema: {error}")
    except msgspec.DecodeError as error:
        return fail(f"The arguments are not valid JSON: {error}")
    except Exception as error:
        return _describe(tool, error)


def _describe(tool: Tool, error: Exception) -> ToolResult:
    logger.warning("the tool %s raised", tool.name, exc_info=error)
    return fail(f"{type(error).__name__}: {error}")


def fail(message: str) -> ToolResult:
    """An error as the model reads it."""
    return ToolResult(msgspec.json.encode({"error": message}).decode(), is_error=True)
