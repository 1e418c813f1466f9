"""`@tool`: a typed Python function becomes a tool."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import re
import threading
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, overload

import msgspec
from msgspec import Meta

from antiphon.errors import ConfigError
from antiphon.tools.base import OnInterrupt, Tool, ToolContext, ToolResult, require_name
from antiphon.tools.schema import JsonType

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], *, name: str) -> T:
    """What the work returns or raises. If this is cancelled, the work goes on, but nobody hears of it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is a result if there is no error

    def post(result: T | None, error: BaseException | None) -> None:
        # The loop may be closed by the time that the work is done.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    def run() -> None:
        try:
            result = work()
        except StopIteration as error:
            # A future cannot carry it.
            post(None, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            post(None, error)
        else:
            post(result, None)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    return await done


Function = Callable[..., Any]


@overload
def tool(function: Function, /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool = True,
    timeout: float | None = None,
    retries: int = 0,
    concurrency: int | None = None,
    needs_approval: bool | Callable[[Mapping[str, Any]], bool] = False,
    on_interrupt: OnInterrupt = "ask",
    repeatable: bool = False,
) -> Callable[[Function], Tool]: ...


def tool(function: Function | None = None, /, **options: Any) -> Tool | Callable[[Function], Tool]:
    """Make a tool of a function: its signature is the schema, its docstring says what it is for.

    A parameter of type `ToolContext` is not the model's to fill: it gets the context of the call. A function that is
    not a coroutine runs in a thread. What the parameters are for is read from `Annotated[..., "text"]` or from the
    docstring's `Args:`.
    """
    if function is not None:
        return _make(function)
    return lambda decorated: _make(decorated, **options)


def _make(
    function: Function, *, name: str | None = None, description: str | None = None, strict: bool = True, **options: Any
) -> Tool:
    written = _find_written(function)
    called = str(name or getattr(written, "__name__", type(written).__name__))
    require_name(called)
    summary, explained = _read_docstring(_find_docstring(written))
    if not (description or summary):
        raise ConfigError(f"The tool '{called}' has no docstring, so a model cannot know what it is for.")
    signature = _Signature(function, called, explained, strict=strict)
    return Tool(
        name=called,
        description=description or summary,
        parameters=signature.shape.schema,
        strict=strict,
        invoke=functools.partial(_invoke, function, signature),
        **options,
    )


def _find_written(function: Function) -> Function:
    """What somebody has written down: arguments may have been bound to it since."""
    return _find_written(function.func) if isinstance(function, functools.partial) else function


def _find_method(written: Any) -> Any:
    """What is run when an object is called that is no function."""
    return None if inspect.isroutine(written) or isinstance(written, type) else written.__call__


def _find_docstring(written: Function) -> str:
    method = _find_method(written)
    if method is None:
        return inspect.getdoc(written) or ""
    return inspect.cleandoc(method.__doc__ or type(written).__doc__ or "")


class _Signature:
    """The parameters of a function, as one struct."""

    def __init__(self, function: Function, name: str, explained: Mapping[str, str], *, strict: bool) -> None:
        hints = _read_hints(function, name)
        self.name = name
        self.context: str | None = None
        fields: list[Any] = []
        bound = function.keywords if isinstance(function, functools.partial) else {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in bound:
                continue
            kind = hints.get(parameter.name)
            if isinstance(kind, type) and issubclass(kind, ToolContext):
                self.context = parameter.name
                continue
            _check(parameter, kind, name)
            described = _describe(kind, explained.get(parameter.name))
            if parameter.default is parameter.empty:
                fields.append((parameter.name, described))
            else:
                default = msgspec.field(default_factory=functools.partial(_give, parameter.default))
                fields.append((parameter.name, described, default))
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        self.shape = JsonType(arguments, where=name, strict=strict)

    def read(self, text: str) -> dict[str, Any]:
        """The arguments by name."""
        read = self.shape.read(text or "{}")
        return {name: getattr(read, name) for name in read.__struct_fields__}


def _give(default: Any) -> Any:
    return default


def _read_hints(function: Function, name: str) -> dict[str, Any]:
    written = _find_written(function)
    try:
        return typing.get_type_hints(_find_method(written) or written, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"The types of the tool '{name}' cannot be read: {error}") from None


def _check(parameter: inspect.Parameter, kind: Any, name: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ConfigError(f"The tool '{name}' cannot have the parameter '{parameter}': arguments are passed by name.")
    if kind is None:
        raise ConfigError(f"The parameter '{parameter.name}' of the tool '{name}' has no type.")


def _describe(kind: Any, explained: str | None) -> Any:
    """The type, with its description where JSON Schema wants it."""
    if typing.get_origin(kind) is Annotated:
        plain, *notes = typing.get_args(kind)
        notes = [meta for note in notes for meta in _read_note(note)]
        if explained and not any(isinstance(note, Meta) and note.description for note in notes):
            notes.append(Meta(description=explained))
        return Annotated[(plain, *notes)]
    return Annotated[kind, Meta(description=explained)] if explained else kind


def _read_note(note: Any) -> list[Any]:
    """What a note says of its type, in our terms: a text describes it, and pydantic's fields limit it too."""
    if isinstance(note, str):
        return [Meta(description=note)]
    if isinstance(note, Meta):
        return [note]
    described = {"description": note.description} if getattr(note, "description", None) else {}
    limits = {
        name: getattr(each, name)
        for each in (note, *getattr(note, "metadata", ()))
        for name in _LIMITS
        if getattr(each, name, None) is not None
    }
    return [Meta(**described, **limits)] if described or limits else [note]


_LIMITS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")
_SECTION = re.compile(r"^(args|arguments|parameters|returns|raises|yields|examples?|notes?):?\s*$", re.IGNORECASE)
_ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_FIELD = re.compile(r"^:param\s+(?:[\w\[\], |]+\s+)?(\w+):\s*(.*)$")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a function is for, and what its parameters are, in the style of Google or of Sphinx."""
    summary: list[str] = []
    explained: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        found = _SECTION.match(line)
        if found and (any(summary) or line.rstrip().endswith(":")):
            section, last = found[1].lower(), ""
            continue
        if field := _FIELD.match(line):
            section, last = "args", field[1]
            explained[last] = field[2].strip()
        elif not section:
            summary.append(line)
        elif section in ("args", "arguments", "parameters"):
            argument = _ARGUMENT.match(line)
            if argument:
                last = argument[1]
                explained[last] = argument[2].strip()
            elif last and line.strip():
                explained[last] = f"{explained[last]} {line.strip()}"
    return "\n".join(summary).strip(), explained


async def _invoke(function: Function, signature: _Signature, text: str, context: ToolContext) -> ToolResult:
    arguments = signature.read(text)
    if signature.context is not None:
        arguments[signature.context] = context
    try:
        return as_result(await _call(function, arguments, name=signature.name))
    except msgspec.MsgspecError as error:
        # The function's own trouble with some data: it must not look as if the arguments were at fault.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _call(function: Function, arguments: Mapping[str, Any], *, name: str) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    # A thread cannot be stopped: one that outlives its timeout goes on, but nobody waits for it any more.
    result = await run_in_thread(functools.partial(function, **arguments), name=f"tool {name}")
    return await result if inspect.isawaitable(result) else result


def as_result(value: Any) -> ToolResult:
    """What a function returned, as a model reads it: text as it is, anything else as JSON."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    if hasattr(value, "model_dump_json"):
        return ToolResult(value.model_dump_json())
    return ToolResult(msgspec.json.encode(value, enc_hook=_encode_pydantic).decode())


def _encode_pydantic(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"A tool returned a {type(value).__name__}, which has no JSON form.")
