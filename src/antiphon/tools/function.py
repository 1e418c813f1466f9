"""`@tool`: make a tool of a typed Python function."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import re
import threading
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, Union, overload

import msgspec
from msgspec import Meta

from antiphon.errors import ConfigError
from antiphon.tools.base import ContentPart, OnInterrupt, RunContext, Tool, ToolContext, ToolResult, require_name
from antiphon.tools.executor import replace_unsupported
from antiphon.tools.pydantic_types import Adapter, encode_pydantic, find_field_default, is_field, support_pydantic
from antiphon.tools.schema import JsonType

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Function = Callable[..., Any]

# Docstrings in the style of Google (`Args:`) and of Sphinx (`:param name:`).
_SECTION = re.compile(r"^(args|arguments|parameters|returns|raises|yields|examples?|notes?):?\s*$", re.IGNORECASE)
_ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_FIELD = re.compile(r"^:param\s+(?:[\w\[\], |]+\s+)?(\w+):\s*(.*)$")

# Types whose subclasses msgspec does not encode, each with the function that makes a value of the type itself.
_PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    (Mapping, dict),
    (PurePath, str),
)


class CallableTool(Tool, Generic[P, R], frozen=True, kw_only=True):
    """A tool made of a function. Calling it calls the function, outside of any run."""

    function: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[P, R]:
        """The function. `inspect.signature` and documentation tools look for this name."""
        return self.function


@overload
def tool(function: Callable[P, R], /) -> CallableTool[P, R]: ...


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
    final: bool = False,
) -> Callable[[Callable[P, R]], CallableTool[P, R]]: ...


def tool(function: Function | None = None, /, **options: Any) -> Any:
    """Make a tool of a function. Its signature becomes the schema, its docstring the description.

    A parameter of type `ToolContext` or `RunContext` is not part of the schema; it gets the context of the call. A
    function that is not a coroutine runs in a thread. Descriptions of parameters come from `Annotated[..., "text"]` or
    from `Args:` in the docstring.
    """
    if function is not None and not callable(function):
        raise ConfigError(f"@tool: expected a function, got {function!r}. Options are named: @tool(name=...).")
    if function is not None:
        return _make_tool(function)
    return lambda decorated: _make_tool(decorated, **options)


def make_result(value: Any) -> ToolResult:
    """Make a result of a return value: a text unchanged, images and files as parts, anything else as JSON."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(str.__str__(value))
    if isinstance(value, ContentPart):
        return ToolResult([value.to_part()])
    if isinstance(value, list | tuple) and any(issubclass(kind, ContentPart) for kind in set(map(type, value))):
        return ToolResult([part for each in value for part in _make_parts(each)])
    if hasattr(value, "model_dump_json"):
        return ToolResult(value.model_dump_json(by_alias=True))
    with contextlib.suppress(UnicodeEncodeError):
        encoded = encode_json(value)
        if b"null" not in encoded:
            return ToolResult(encoded.decode())
    builtins = msgspec.to_builtins(value, str_keys=True, enc_hook=_encode_other)
    return ToolResult(msgspec.json.encode(replace_unsupported(builtins)).decode())


def _make_parts(value: Any) -> list[dict[str, Any]]:
    output = make_result(value).output
    return [{"type": "input_text", "text": output}] if isinstance(output, str) else output


def encode_json(value: Any) -> bytes:
    """Encode a value that may contain models of pydantic, and subclasses of texts and numbers such as NumPy has."""
    return msgspec.json.encode(value, enc_hook=_encode_other)


def _encode_other(value: Any) -> Any:
    """Return a value that msgspec does not encode as one that it encodes."""
    try:
        return encode_pydantic(value)
    except NotImplementedError:
        make_plain = next((make for kind, make in _PLAIN if isinstance(value, kind)), None)
        if make_plain is None:
            raise
        return make_plain(value)


# Definition


def _make_tool(
    function: Function, *, name: str | None = None, description: str | None = None, strict: bool = True, **options: Any
) -> CallableTool[..., Any]:
    definition = _unwrap_partial(function)
    tool_name = str(name or getattr(definition, "__name__", type(definition).__name__))
    require_name(tool_name)
    summary, descriptions = _parse_docstring(_get_docstring(definition))
    if not (description or summary):
        raise ConfigError(f"The tool '{tool_name}' has no docstring. The model needs one as a description.")
    if inspect.isgeneratorfunction(definition) or inspect.isasyncgenfunction(definition):
        raise ConfigError(
            f"The tool '{tool_name}' is a generator. Return one result, and report progress with `ToolContext.report`."
        )
    signature = _Signature(function, tool_name, descriptions, strict=strict)
    return CallableTool(
        function=function,
        name=tool_name,
        description=description or summary,
        parameters=signature.arguments_type.schema,
        strict=strict,
        invoke=functools.partial(_invoke, function, signature),
        **options,
    )


def _unwrap_partial(function: Function) -> Function:
    return _unwrap_partial(function.func) if isinstance(function, functools.partial) else function


def _find_call_method(definition: Any) -> Any:
    """Return `__call__` of a callable object, or None for a function or a class."""
    return None if inspect.isroutine(definition) or isinstance(definition, type) else definition.__call__


def _get_docstring(definition: Function) -> str:
    method = _find_call_method(definition)
    if method is None:
        return inspect.getdoc(definition) or ""
    return inspect.cleandoc(method.__doc__ or type(definition).__doc__ or "")


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function and those of its parameters."""
    summary: list[str] = []
    descriptions: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        found = _SECTION.match(line)
        if found and (any(summary) or line.rstrip().endswith(":")):
            section, last = found[1].lower(), ""
            continue
        if field := _FIELD.match(line):
            section, last = "args", field[1]
            descriptions[last] = field[2].strip()
        elif not section:
            summary.append(line)
        elif section in ("args", "arguments", "parameters"):
            argument = _ARGUMENT.match(line)
            if argument:
                last = argument[1]
                descriptions[last] = argument[2].strip()
            elif last and line.strip():
                descriptions[last] = f"{descriptions[last]} {line.strip()}"
    return "\n".join(summary).strip(), descriptions


class _Signature:
    """The parameters of a function as one struct type. `contexts` are the names of those that get the context."""

    def __init__(self, function: Function, name: str, descriptions: Mapping[str, str], *, strict: bool) -> None:
        hints = _get_type_hints(function, name)
        self.name = name
        self.contexts: list[str] = []
        fields: list[Any] = []
        bound = function.keywords if isinstance(function, functools.partial) else {}
        for parameter in _get_parameters(function, name):
            if parameter.name in bound:
                continue
            kind = hints.get(parameter.name)
            if _is_context(kind):
                self.contexts.append(parameter.name)
                continue
            _check_parameter(parameter, kind, name)
            where = f"{name}.{parameter.name}"
            field = parameter.default if is_field(parameter.default) else None
            supported = support_pydantic(kind, where, field=field)
            annotated = _add_description(supported, descriptions.get(parameter.name))
            if parameter.default is parameter.empty or field is not None:
                make_default = find_field_default(kind, field, where)
            else:
                make_default = functools.partial(_return_default, parameter.default)
            default = () if make_default is None else (msgspec.field(default_factory=make_default),)
            fields.append((parameter.name, annotated, *default))
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        self.arguments_type = JsonType(arguments, where=name, strict=strict)

    def parse_arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments by name."""
        arguments = self.arguments_type.decode(text or "{}")
        return {name: getattr(arguments, name) for name in arguments.__struct_fields__}


def _is_context(kind: Any) -> bool:
    """Return True for RunContext and ToolContext, even with the type of the deps, and for one of them or None."""
    origin = typing.get_origin(kind)
    if origin in (Annotated, Union, types.UnionType):
        return any(map(_is_context, typing.get_args(kind)))
    plain = origin or kind
    return isinstance(plain, type) and issubclass(plain, RunContext)


def _return_default(default: Any) -> Any:
    return default


def _get_type_hints(function: Function, name: str) -> dict[str, Any]:
    definition = _unwrap_partial(function)
    try:
        return typing.get_type_hints(_find_call_method(definition) or definition, include_extras=True)
    except (NameError, TypeError) as error:
        hint = " Define or import it at the top of the module." if isinstance(error, NameError) else ""
        raise ConfigError(f"The type hints of the tool '{name}' cannot be evaluated: {error}.{hint}") from None


def _get_parameters(function: Function, name: str) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(function).parameters.values()
    except ValueError:
        raise ConfigError(
            f"The function of the tool '{name}' has no signature. Wrap it in a function with types."
        ) from None


def _check_parameter(parameter: inspect.Parameter, kind: Any, name: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ConfigError(f"The tool '{name}' cannot have the parameter '{parameter}': arguments are passed by name.")
    if kind is None:
        hint = " Make a tool of the bound method: `tool(instance.method)`." if parameter.name == "self" else ""
        raise ConfigError(f"The parameter '{parameter.name}' of the tool '{name}' has no type.{hint}")


def _add_description(kind: Any, description: str | None) -> Any:
    """Return the type, annotated with the description unless its annotations have one. Texts are descriptions."""
    is_annotated = typing.get_origin(kind) is Annotated
    plain, *annotations = typing.get_args(kind) if is_annotated else (kind,)
    annotations = [_translate_description(each) for each in annotations]
    described = [*annotations, plain] if isinstance(plain, Adapter) else annotations
    if description and not any(getattr(each, "description", None) for each in described):
        annotations.append(Meta(description=description))
    return Annotated[(plain, *annotations)] if annotations else plain


def _translate_description(annotation: Any) -> Any:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "description", None)
    return Meta(description=text) if isinstance(text, str) and not isinstance(annotation, Meta) else annotation


# Calls


async def _invoke(function: Function, signature: _Signature, text: str, context: ToolContext[Any]) -> ToolResult:
    arguments = signature.parse_arguments(text) | dict.fromkeys(signature.contexts, context)
    try:
        return make_result(await call_function(function, arguments, name=signature.name))
    except msgspec.MsgspecError as error:
        # Raised by the function itself. The executor would report it as an error in the arguments.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def call_function(function: Function, arguments: Mapping[str, Any], *, name: str) -> Any:
    """Return the result of a function. One that is not a coroutine function runs in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    result = await _run_in_thread(functools.partial(function, **arguments), name=f"tool {name}")
    return await result if inspect.isawaitable(result) else result


async def _run_in_thread(function: Callable[[], T], *, name: str) -> T:
    """Run `function` in a daemon thread and await its result.

    A thread cannot be stopped. The first cancellation is ignored, so that the caller knows that the function is still
    running. A second one ends the await.
    """
    done = _start_thread(function, name=name)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        return await done


def _start_thread(function: Callable[[], T], *, name: str) -> asyncio.Future[T]:
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
        # The loop may be closed before the function returns.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    def run() -> None:
        try:
            result = function()
        except StopIteration as error:
            # A future refuses StopIteration.
            post(None, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            post(None, error)
        else:
            post(result, None)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    return done
