"""The arguments with which a run is started or resumed, and their checks."""

import asyncio
import inspect
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, get_args

import msgspec

from antiphon.agent.approvals import Approval
from antiphon.agent.content import ContentInput, is_content, user_message
from antiphon.agent.limits import Limits, Prices
from antiphon.errors import ConfigError, InvalidRequest
from antiphon.ledger import Ledger, find_first_run
from antiphon.protocol.json_text import JsonObject
from antiphon.session import Session
from antiphon.tools.toolset import Member

Input: TypeAlias = str | Sequence[ContentInput] | Sequence[JsonObject]
"""The task of a run: a text, the parts of one user message, or items."""


class CommonOptions(TypedDict, total=False):
    """The options of a run and of its resumption.

    A `session` is continued; other runs that use it wait for the end of this one. `model` replaces that of the agent,
    `settings` are added to its settings and `tools` to its tools; they do not apply to agents of handoffs. `limits`
    replace those of the agent. With a `ledger`, another process can resume the run. Setting `cancel` cancels the run,
    which then has an outcome. `durable` is the former name of `ledger`.
    """

    session: Session | None
    model: str | None
    settings: Mapping[str, Any] | None
    tools: Sequence[Member]
    limits: Limits | None
    ledger: Ledger | None
    cancel: asyncio.Event | None
    durable: Ledger | None


class StartOptions(CommonOptions, total=False):
    """The options of a new run. `history` are the items of an earlier conversation without a session."""

    history: Sequence[JsonObject]
    run_id: str | None


class ResumeOptions(CommonOptions, total=False):
    """The options of a resumption.

    `approvals` are the verdicts on the pending calls of the run, by call id. Pass the `session` and the `tools` of the
    run again. Its `model`, `settings` and `limits` are in the journal; they can be replaced. With `force`, a run is
    resumed even if another process executes it: that process stops before its next tool call.
    """

    approvals: Mapping[str, Approval] | None
    force: bool


Options = TypeVar("Options", bound=CommonOptions)


def make_run_id() -> str:
    return f"run_{int(time.time() * 1000):x}{secrets.token_hex(8)}"


def read_task(task: Any) -> list[JsonObject]:
    """Return the items of a task. Texts, images and files become one message of the user."""
    if isinstance(task, str):
        return [{"role": "user", "content": str.__str__(task)}]
    if is_content(task):
        return [user_message(task)]
    if isinstance(task, Sequence) and task and all(map(is_content, task)):
        return [user_message(*task)]
    if not isinstance(task, Sequence) or not all(isinstance(item, dict) for item in task):
        raise InvalidRequest(
            "A task must be a string, a list of strings, images and files, or a list of items.", param="task"
        )
    return list(task)


def require_json(value: object, param: str) -> None:
    """Raise InvalidRequest for a value that a journal cannot store."""
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The {param} cannot be encoded as JSON: {error}.", param=param) from None


def check_deps(deps: object, deps_type: Any) -> None:
    """Raise InvalidRequest if the deps of a run are not those that its agent declares."""
    if deps_type in (None, Any):
        return
    try:
        fits = isinstance(deps, deps_type)
    except TypeError:
        # Protocols and generic types cannot be checked here.
        fits = deps is not None or type(None) in get_args(deps_type)
    if not fits:
        expected = getattr(deps_type, "__name__", str(deps_type))
        if deps is None:
            raise InvalidRequest(f"deps: the agent requires a {expected}. Pass it as deps=.", param="deps")
        raise InvalidRequest(f"deps: expected {expected}, got {type(deps).__name__}.", param="deps")


def check_settings(settings: Mapping[str, Any] | None, conversation_state: str) -> None:
    """Raise ConfigError for settings that are not JSON, that would have no effect, or that contradict the agent."""
    if not settings:
        return
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings: expected a dictionary of parameters, got {type(settings).__name__}.")
    check_encodable(dict(settings), "settings")
    if "input" in settings:
        raise ConfigError("settings: 'input' is the task of a run. Pass earlier items as 'history'.")
    if settings.get("stream") not in (None, True):
        raise ConfigError("settings: 'stream' must be true. An agent always reads a stream; 'run' returns its outcome.")
    if conversation_state == "server" and settings.get("store") not in (None, True):
        raise ConfigError("settings: 'store' must be true, because conversation_state is 'server'.")


def check_encodable(value: Any, path: str) -> None:
    """Raise ConfigError, with the path of the first value that cannot be part of a request."""
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        inner: Any = value.items() if isinstance(value, dict) else ()
        if isinstance(value, list | tuple):
            inner = enumerate(value)
        if not isinstance(error, RecursionError):
            for name, each in inner:
                check_encodable(each, f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}")
        raise ConfigError(
            f"{path}: a value of type {type(value).__name__} cannot be encoded as JSON: {error}."
        ) from None


def takes_context(hook: Callable[..., object]) -> bool:
    """Return True if a hook takes the context of the run as its second argument."""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
    ]
    return len(positional) > 1


def read_history(history: Any) -> list[JsonObject]:
    """Return the earlier items of a run. Raises InvalidRequest for anything else."""
    if not isinstance(history, Sequence) or not all(isinstance(item, dict) for item in history):
        raise InvalidRequest("history: expected a list of items, such as outcome.history.", param="history")
    return list(history)


def check_run(run: object) -> None:
    """Raise InvalidRequest if a value is neither the id nor the state of a run."""
    if not isinstance(run, str | bytes):
        reason = " It is None for a run that has an answer." if run is None else ""
        raise InvalidRequest(
            f"run: expected the id of a run or the state of its outcome, got {type(run).__name__}.{reason}", param="run"
        )


def check_run_id(run_id: object, ledger: Ledger | None) -> str:
    """Return the id of a new run.

    Raises ConfigError for an id that is not a text, and InvalidRequest for one that a subagent may have: with a ledger,
    a run is stored under its id, and the runs of its subagents under the ids that are derived from it.
    """
    text = check_text(run_id, "run_id")
    first = None if ledger is None else find_first_run(text)
    if first is not None:
        raise InvalidRequest(
            f"run_id: {run_id!r} has the form of the ids that the subagents of the run {first!r} get. "
            "Use an id that does not end with two numbers after colons.",
            param="run_id",
            code="invalid_run_id",
        )
    return text


def check_cancel(cancel: Any) -> None:
    """Raise ConfigError if a value is neither None nor an asyncio.Event."""
    wait = getattr(cancel, "wait", None)
    if cancel is not None and not (hasattr(cancel, "is_set") and inspect.iscoroutinefunction(wait)):
        raise ConfigError(f"cancel: expected an asyncio.Event, got {type(cancel).__name__}.")


def check_types(ledger: object, session: object, limits: object) -> None:
    """Raise ConfigError if one of these arguments of a run is neither None nor of its type."""
    if ledger is not None and not hasattr(ledger, "append"):
        raise ConfigError(f"ledger: expected a ledger such as SqliteLedger(path), got {type(ledger).__name__}.")
    if session is not None and not isinstance(session, Session):
        raise ConfigError(f"session: expected a session such as MemorySession(), got {type(session).__name__}.")
    if limits is not None and not isinstance(limits, Limits):
        raise ConfigError(f"limits: expected Limits, got {type(limits).__name__}.")


def check_text(value: object, where: str) -> str:
    """Return a text that the journal of a run stores. Raises ConfigError for another type, and for lone surrogates."""
    if not isinstance(value, str):
        raise ConfigError(f"{where}: expected a text, got {type(value).__name__}.")
    # JSON does not encode subclasses.
    text = str.__str__(value)
    check_encodable(text, where)
    return text


def check_instructions(value: Any) -> Any:
    """Return the instructions of an agent. Raises ConfigError for anything but a text, a function and None."""
    if isinstance(value, str):
        return check_text(value, "instructions")
    if value is not None and not callable(value):
        raise ConfigError(f"instructions: expected a text or a function, got {type(value).__name__}.")
    return value


def check_agent_types(limits: object, prices: object) -> None:
    """Raise ConfigError if one of these options of an agent is neither None nor of its type."""
    check_types(None, None, limits)
    if prices is not None and not isinstance(prices, Prices):
        raise ConfigError(f"prices: expected Prices, got {type(prices).__name__}.")


def check_functions(**functions: object) -> None:
    """Raise ConfigError if one of these options is neither None nor a function."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name}: expected a function, got {type(function).__name__}.")


def check_hooks(hooks: Any) -> tuple[Any, ...]:
    """Return the hooks of an agent. Raises ConfigError if they are not functions."""
    if not isinstance(hooks, Iterable):
        raise ConfigError(f"hooks: expected a list of functions, got {type(hooks).__name__}.")
    checked = tuple(hooks)
    for hook in checked:
        if not callable(hook):
            raise ConfigError(f"hooks: expected functions, got {type(hook).__name__}.")
    return checked


def rename_durable(options: Options, kind: type[Options]) -> Options:
    """Return the options with the ledger under its present name. Raises TypeError for an unknown option."""
    unknown = next((name for name in options if name not in kind.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"got an unexpected keyword argument '{unknown}'")
    durable = options.get("durable")
    if durable is None:
        return options
    if options.get("ledger") is not None:
        raise ConfigError("Pass the ledger as 'ledger' only: 'durable' is its former name.")
    warn_deprecated("durable", "ledger", stacklevel=4)
    renamed = options.copy()
    renamed["ledger"] = durable  # type: ignore[arg-type]  # mypy loses the type of a value if the options are generic
    renamed["durable"] = None
    return renamed


def warn_deprecated(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn about a former name of a parameter, at the line that has called the agent."""
    warnings.warn(f"The parameter '{old}' is called '{new}' now.", DeprecationWarning, stacklevel=stacklevel)
