"""Execution of tool calls. An error in a tool becomes the result of the call and does not end the run."""

import asyncio
import json
import logging
import math
import random
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from antiphon.callbacks import is_cancelling
from antiphon.errors import ConfigError
from antiphon.ledger import LedgerFailed, RunTaken, defer_cancellation, repeat_cancellation
from antiphon.tools.base import ApprovalRequired, MissingTool, ModelRetry, Tool, ToolContext, ToolInvocation, ToolResult

logger = logging.getLogger(__name__)

Slots = dict[str, asyncio.Semaphore]

STOP_SECONDS = 0.5
"""The time in which a tool must stop after it was cancelled. Then it is left running and the run goes on."""

CANCELLED_ITSELF = "The tool cancelled itself."

_FIRST_DELAY_SECONDS = 0.2
_MAX_DELAY_SECONDS = 5.0

# The number of exceptions of a group that the model reads, and the length of each.
_MAX_SHOWN = 10
_MAX_INNER = 500

# Tasks of tools that did not stop. The event loop itself has no strong references to tasks.
_abandoned: set[asyncio.Task[ToolResult]] = set()


class CallObserver:
    """Receives the steps of a call."""

    async def begin(self) -> None:
        """Called before each attempt. If it raises, the tool is not called."""

    def give_up(self) -> None:
        """Called if the tool does not stop when it is cancelled. The tool keeps running, and its result is lost."""


class Executor:
    """Calls tools by name, each within its own limits.

    `unknown` is the error that a model gets for an unknown tool name. Default: a list of the known tools.
    """

    def __init__(self, tools: Iterable[Tool], *, unknown: str | None = None) -> None:
        self.tools: Mapping[str, Tool] = _index_by_name(tools)
        self._unknown = unknown
        # A semaphore belongs to one event loop, and an agent may be used in several loops, one after the other.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, Slots] = WeakKeyDictionary()

    def with_tools(self, tools: Iterable[Tool]) -> "Executor":
        """Return an executor with other tools. Tools of the same name share the limit of their concurrency."""
        other = Executor(tools, unknown=self._unknown)
        other._slots = self._slots
        return other

    def replace_tools(self, tools: Iterable[Tool]) -> None:
        """Use these tools for the following calls."""
        self.tools = _index_by_name(tools)

    async def execute(
        self, call: ToolInvocation, context: ToolContext[Any], observer: CallObserver | None = None
    ) -> ToolResult:
        """Return the result of a call.

        Raise only if it is cancelled, needs approval (`ApprovalRequired`) or a tool (`MissingTool`), or belongs to a
        run that another process has taken over (`RunTaken`) or whose entries cannot be stored (`LedgerFailed`).
        """
        observer = observer or CallObserver()
        tool = self.tools.get(call.name)
        if tool is None:
            await observer.begin()
            known = ", ".join(self.tools) or "none"
            return make_error_result(self._unknown or f"There is no tool '{call.name}'. There are: {known}.")
        if tool.concurrency is None:
            return await _call_with_retries(tool, call, context, observer)
        async with self._slot(tool.name, tool.concurrency):
            return await _call_with_retries(tool, call, context, observer)

    def _slot(self, name: str, concurrency: int) -> asyncio.Semaphore:
        slots = self._slots.setdefault(asyncio.get_running_loop(), {})
        return slots.setdefault(name, asyncio.Semaphore(concurrency))


def make_error_result(message: str) -> ToolResult:
    """Return an error as the model reads it."""
    return ToolResult(msgspec.json.encode({"error": replace_surrogates(message)}).decode(), is_error=True)


def find_error(text: str) -> str | None:
    """Return the message of an error result, with the paragraphs that were added to it; None for another text."""
    if not text.startswith('{"error":'):
        return None
    try:
        result, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    added = text[end:]
    return f"{result['error']}{added}" if not added or added.startswith("\n\n") else None


def add_to_error(result: ToolResult, sentence: str) -> ToolResult:
    """Return an error result with another sentence in its message."""
    if not isinstance(result.output, str):
        output: str | list[dict[str, Any]] = [*result.output, {"type": "input_text", "text": sentence}]
    elif (message := find_error(result.output)) is not None and make_error_result(message).output == result.output:
        end = "" if message.endswith((".", "?", "!")) or not message else "."
        output = make_error_result(f"{message}{end} {sentence}".lstrip()).output
    else:
        output = f"{result.output}\n\n{sentence}"
    return msgspec.structs.replace(result, output=output)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which file names may contain and JSON requests cannot."""
    return text.encode(errors="replace").decode()


def replace_unsupported(value: Any) -> Any:
    """Replace lone surrogates, and NaN and infinities by their names: a model would read null as a missing value."""
    if isinstance(value, dict):
        return {replace_surrogates(name): replace_unsupported(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [replace_unsupported(each) for each in value]
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class _RetryableError(Exception):
    """A failed attempt that may succeed when it is repeated. Its effect may still have happened."""

    def __init__(self, message: str, *, may_have_happened: bool = False) -> None:
        super().__init__(message)
        self.may_have_happened = may_have_happened


def _index_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise ConfigError(f"There are two tools called '{tool.name}'.")
        named[tool.name] = tool
    return named


async def _call_with_retries(
    tool: Tool, call: ToolInvocation, context: ToolContext[Any], observer: CallObserver
) -> ToolResult:
    is_unknown = False
    for attempt in range(tool.retries + 1):
        await observer.begin()
        try:
            result = await _call_once(tool, call, context, observer)
            # An error of the last attempt does not undo the effect of an earlier one.
            is_unknown = result.is_error and (is_unknown or result.may_have_happened)
            return msgspec.structs.replace(result, may_have_happened=is_unknown)
        except _RetryableError as error:
            is_unknown |= error.may_have_happened
            if attempt == tool.retries:
                return msgspec.structs.replace(make_error_result(str(error)), may_have_happened=is_unknown)
            logger.info("retrying the tool %s: %s", tool.name, error)
            await asyncio.sleep(min(_FIRST_DELAY_SECONDS * 2**attempt, _MAX_DELAY_SECONDS) * random.uniform(0.5, 1.0))
    raise AssertionError("the last attempt returns")


async def _call_once(tool: Tool, call: ToolInvocation, context: ToolContext[Any], observer: CallObserver) -> ToolResult:
    """Call a tool in a task of its own, which is left running if it does not stop when it is cancelled."""
    work = asyncio.create_task(_invoke(tool, call, context))
    try:
        await asyncio.wait((work,), timeout=tool.timeout)
    except asyncio.CancelledError:
        if not await _stop(tool, work):
            observer.give_up()
        if not work.done() or work.cancelled() or work.exception() is not None:
            raise
        # It has finished in spite of the cancellation, so its effect is known.
        repeat_cancellation()
    is_late = not work.done()
    if is_late and not await _stop(tool, work):
        observer.give_up()
        message = f"The tool took longer than {tool.timeout:g} seconds and did not stop. It may still be running."
        return msgspec.structs.replace(make_error_result(message), may_have_happened=True)
    try:
        return work.result()
    except asyncio.CancelledError:
        message = (
            f"The tool took longer than {tool.timeout:g} seconds and was stopped." if is_late else CANCELLED_ITSELF
        )
        raise _RetryableError(message, may_have_happened=is_late) from None
    except GeneratorExit:
        raise _RetryableError("GeneratorExit: the tool closed itself.", may_have_happened=is_late) from None
    except _RetryableError as error:
        # A tool may raise another exception when it is stopped.
        error.may_have_happened |= is_late
        raise


async def _stop(tool: Tool, work: asyncio.Task[ToolResult]) -> bool:
    """Cancel a call. Return False if it continues to run."""
    work.cancel()
    seconds = getattr(tool.invoke, "stop_seconds", STOP_SECONDS)
    # The caller may be cancelled again meanwhile. It still waits, but never longer than this.
    waiting = asyncio.ensure_future(asyncio.wait((work,), timeout=seconds))
    await defer_cancellation(waiting)
    if not work.done():
        logger.warning("the tool %s does not stop and is left running", tool.name)
        _abandoned.add(work)
        work.add_done_callback(_forget)
    return work.done()


def _forget(work: asyncio.Task[ToolResult]) -> None:
    _abandoned.discard(work)
    if not work.cancelled():
        # Mark the exception as retrieved.
        work.exception()


async def _invoke(tool: Tool, call: ToolInvocation, context: ToolContext[Any]) -> ToolResult:
    try:
        return validate_result(await tool.invoke(call.arguments, context))
    except (ApprovalRequired, MissingTool, RunTaken, LedgerFailed, KeyboardInterrupt, GeneratorExit):
        raise
    except ModelRetry as retry:
        return make_error_result(str(retry))
    except msgspec.ValidationError as error:
        return make_error_result(f"The arguments do not fit the schema: {error}")
    except msgspec.DecodeError as error:
        return make_error_result(f"The arguments are not valid JSON: {error}")
    except asyncio.CancelledError:
        if is_cancelling():
            raise
        # This task was not cancelled: the tool cancelled a task of its own.
        raise _RetryableError(CANCELLED_ITSELF) from None
    except BaseException as error:
        # Some extension modules raise panics that do not derive from Exception, and tools may call sys.exit. Neither
        # ends the run.
        logger.warning("the tool %s raised an exception", tool.name, exc_info=error)
        raise _RetryableError(_describe_exception(error), may_have_happened=_may_have_happened(error)) from None


def validate_result(result: object) -> ToolResult:
    """Return the result as a journal stores it. Raises TypeError if its fields have other types."""
    if not isinstance(result, ToolResult):
        raise TypeError(f"the tool returned {type(result).__name__}, not ToolResult")
    try:
        # The journal must be able to decode the result again, and a Struct does not check the types of its fields.
        result = msgspec.convert(msgspec.to_builtins(result), ToolResult)
    except msgspec.ValidationError as error:
        raise TypeError(f"the tool returned an invalid ToolResult: {error}") from None
    result = _correct_spent(result)
    try:
        encoded = msgspec.json.encode(result.output)
    except UnicodeEncodeError:
        return msgspec.structs.replace(result, output=replace_unsupported(result.output))
    if isinstance(result.output, str):
        return result
    # The history must be equal to that of a resumed run. JSON has no NaN, for example.
    return msgspec.structs.replace(result, output=msgspec.json.decode(encoded))


def _correct_spent(result: ToolResult) -> ToolResult:
    """Return the result without a usage or cost that would make the limits of the run ineffective."""
    spent = result.spent
    if spent is not None and spent.cost is not None and not 0 <= spent.cost < math.inf:
        logger.warning("a tool returned the cost %s: the prices of the run are used instead", spent.cost)
        spent = msgspec.structs.replace(spent, cost=None)
    if spent is not None and min(spent.usage.input_tokens, spent.usage.output_tokens, spent.usage.total_tokens) < 0:
        logger.warning("a tool returned a negative usage, which is ignored")
        spent = None
    return msgspec.structs.replace(result, spent=spent, tool_calls=max(0, result.tool_calls))


def _describe_exception(error: BaseException) -> str:
    """Return the type and the message of an exception, and the exceptions of a group."""
    try:
        message = str(error)
    except Exception:
        message = "the exception has no readable message"
    described = f"{type(error).__name__}: {message}"
    if not isinstance(error, BaseExceptionGroup):
        return described
    inner = [_shorten(_describe_exception(each), _MAX_INNER) for each in error.exceptions[:_MAX_SHOWN]]
    if len(error.exceptions) > _MAX_SHOWN:
        inner.append(f"{len(error.exceptions) - _MAX_SHOWN} more")
    return f"{_shorten(described, _MAX_INNER)} [{'; '.join(inner)}]"


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _may_have_happened(error: BaseException) -> bool:
    """Return True if an exception, or one of a group, states that the call may have had its effect."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_may_have_happened, error.exceptions))
    return getattr(error, "may_have_happened", False) is True
