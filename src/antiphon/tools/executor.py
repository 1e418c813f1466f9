"""The one place where tools are called: whatever happens in one is its result, and never the end of a run."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

import msgspec

from antiphon.errors import ConfigError
from antiphon.tools.base import ApprovalRequired, Tool, ToolContext, ToolInvocation, ToolResult

logger = logging.getLogger(__name__)

Slots = dict[str, asyncio.Semaphore]


class Executor:
    """Calls tools by name, each within its own limits. `unknown` is what a model reads that calls one that is none."""

    def __init__(self, tools: Iterable[Tool], *, unknown: str | None = None) -> None:
        self.tools: Mapping[str, Tool] = _by_name(tools)
        self._unknown = unknown
        # A semaphore belongs to one event loop, and an agent may be used in several, one after the other.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, Slots] = WeakKeyDictionary()

    async def execute(self, call: ToolInvocation, context: ToolContext) -> ToolResult:
        """The result of a call. Only cancelling, and waiting for approval, get out of here as an exception."""
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return make_error_result(self._unknown or f"There is no tool '{call.name}'. There are: {known}.")
        if tool.concurrency is None:
            return await _attempt(tool, call, context)
        async with self._slot(tool.name, tool.concurrency):
            return await _attempt(tool, call, context)

    def _slot(self, name: str, concurrency: int) -> asyncio.Semaphore:
        slots = self._slots.setdefault(asyncio.get_running_loop(), {})
        return slots.setdefault(name, asyncio.Semaphore(concurrency))


def _by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise ConfigError(f"There are two tools called '{tool.name}'.")
        named[tool.name] = tool
    return named


async def _attempt(tool: Tool, call: ToolInvocation, context: ToolContext) -> ToolResult:
    for _ in range(tool.retries):
        try:
            return await _invoke(tool, call, context)
        except _Passing as passing:
            logger.info("the tool %s is called again: %s", tool.name, passing)
    try:
        return await _invoke(tool, call, context)
    except _Passing as passing:
        return make_error_result(str(passing))


class _Passing(Exception):
    """Something went wrong that may go right the next time."""


async def _invoke(tool: Tool, call: ToolInvocation, context: ToolContext) -> ToolResult:
    limit = asyncio.timeout(tool.timeout)
    try:
        async with limit:
            return _require_result(await tool.invoke(call.arguments, context))
    except (ApprovalRequired, KeyboardInterrupt, GeneratorExit):
        raise
    except msgspec.ValidationError as error:
        return make_error_result(f"The arguments do not fit the schema: {error}")
    except msgspec.DecodeError as error:
        return make_error_result(f"The arguments are not valid JSON: {error}")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Nobody has cancelled us: the tool has cancelled something of its own.
        raise _Passing("The tool was cancelled from within.") from None
    except BaseException as error:
        # Extensions panic with what is no Exception, and programs exit: neither is a reason for the run to end.
        if limit.expired():
            raise _Passing(f"The tool took longer than {tool.timeout:g} seconds and was stopped.") from None
        logger.warning("the tool %s raised", tool.name, exc_info=error)
        raise _Passing(f"{type(error).__name__}: {_read_words(error)}") from None


def _require_result(result: object) -> ToolResult:
    if not isinstance(result, ToolResult):
        raise TypeError(f"the tool gave a {type(result).__name__} and not a ToolResult")
    try:
        # What is written down has to be readable again, and nothing checks what a result is made with.
        result = msgspec.convert(msgspec.to_builtins(result), ToolResult)
    except msgspec.ValidationError as error:
        raise TypeError(f"the tool gave a ToolResult that is none: {error}") from None
    try:
        msgspec.json.encode(result.output)
    except UnicodeEncodeError:
        return msgspec.structs.replace(result, output=replace_surrogates(str(result.output)))
    return result


def _read_words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "it cannot be said why"


def replace_surrogates(text: str) -> str:
    """Without half characters, as file names may have them: no request could carry one."""
    return text.encode(errors="replace").decode()


def make_error_result(message: str) -> ToolResult:
    """An error as the model reads it."""
    return ToolResult(msgspec.json.encode({"error": replace_surrogates(message)}).decode(), is_error=True)
