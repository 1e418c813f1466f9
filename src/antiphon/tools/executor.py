"""Execution of tool calls. An error in a tool becomes the result of the call and does not end the run."""

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
    """Calls tools by name, each within its own limits.

    `unknown` is the error that a model gets for an unknown tool name. Default: a list of the known tools.
    """

    def __init__(self, tools: Iterable[Tool], *, unknown: str | None = None) -> None:
        self.tools: Mapping[str, Tool] = _index_by_name(tools)
        self._unknown = unknown
        # A semaphore belongs to one event loop, and an agent may be used in several loops, one after the other.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, Slots] = WeakKeyDictionary()

    async def execute(self, call: ToolInvocation, context: ToolContext) -> ToolResult:
        """Return the result of a call. Raise only if it is cancelled or needs approval (`ApprovalRequired`)."""
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return make_error_result(self._unknown or f"There is no tool '{call.name}'. There are: {known}.")
        if tool.concurrency is None:
            return await _call_with_retries(tool, call, context)
        async with self._slot(tool.name, tool.concurrency):
            return await _call_with_retries(tool, call, context)

    def _slot(self, name: str, concurrency: int) -> asyncio.Semaphore:
        slots = self._slots.setdefault(asyncio.get_running_loop(), {})
        return slots.setdefault(name, asyncio.Semaphore(concurrency))


def make_error_result(message: str) -> ToolResult:
    """Return an error as the model reads it."""
    return ToolResult(msgspec.json.encode({"error": replace_surrogates(message)}).decode(), is_error=True)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which file names may contain and JSON requests cannot."""
    return text.encode(errors="replace").decode()


class _RetryableError(Exception):
    """A failed attempt that may succeed when it is repeated."""


def _index_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise ConfigError(f"There are two tools called '{tool.name}'.")
        named[tool.name] = tool
    return named


async def _call_with_retries(tool: Tool, call: ToolInvocation, context: ToolContext) -> ToolResult:
    for _ in range(tool.retries):
        try:
            return await _call_once(tool, call, context)
        except _RetryableError as error:
            logger.info("retrying the tool %s: %s", tool.name, error)
    try:
        return await _call_once(tool, call, context)
    except _RetryableError as error:
        return make_error_result(str(error))


async def _call_once(tool: Tool, call: ToolInvocation, context: ToolContext) -> ToolResult:
    limit = asyncio.timeout(tool.timeout)
    try:
        async with limit:
            return _validate_result(await tool.invoke(call.arguments, context))
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
        # This task was not cancelled: the tool cancelled a task of its own.
        raise _RetryableError("The tool cancelled itself.") from None
    except BaseException as error:
        # Extension modules raise panics that are no Exception, and programs call sys.exit. Neither ends the run.
        if limit.expired():
            raise _RetryableError(f"The tool took longer than {tool.timeout:g} seconds and was stopped.") from None
        logger.warning("the tool %s raised an exception", tool.name, exc_info=error)
        raise _RetryableError(f"{type(error).__name__}: {_describe_exception(error)}") from None


def _validate_result(result: object) -> ToolResult:
    if not isinstance(result, ToolResult):
        raise TypeError(f"the tool returned {type(result).__name__}, not ToolResult")
    try:
        # The journal must be able to decode the result again, and a Struct does not check the types of its fields.
        result = msgspec.convert(msgspec.to_builtins(result), ToolResult)
    except msgspec.ValidationError as error:
        raise TypeError(f"the tool returned an invalid ToolResult: {error}") from None
    try:
        msgspec.json.encode(result.output)
    except UnicodeEncodeError:
        return msgspec.structs.replace(result, output=replace_surrogates(str(result.output)))
    return result


def _describe_exception(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "the exception has no readable message"
