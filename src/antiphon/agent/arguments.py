"""Checks of the arguments with which a run is started or resumed."""

import inspect
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from antiphon.agent.content import ContentInput, is_content, user_message
from antiphon.agent.limits import Limits
from antiphon.errors import ConfigError, InvalidRequest
from antiphon.ledger import Ledger
from antiphon.protocol.json_text import JsonObject
from antiphon.session import Session

Input: TypeAlias = str | Sequence[ContentInput] | Sequence[JsonObject]
"""The task of a run: a text, the parts of one user message, or items."""


def make_run_id() -> str:
    return f"run_{int(time.time() * 1000):x}{secrets.token_hex(8)}"


def read_task(task: Any) -> list[JsonObject]:
    """Return the items of a task. Texts, images and files become one message of the user."""
    if isinstance(task, str):
        return [{"role": "user", "content": task}]
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
    if deps_type is None:
        return
    try:
        fits = isinstance(deps, deps_type)
    except TypeError:
        # Protocols and generic types cannot be checked here.
        fits = deps is not None
    if not fits:
        expected = getattr(deps_type, "__name__", str(deps_type))
        raise InvalidRequest(f"deps: expected {expected}, got {type(deps).__name__}.", param="deps")


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


def check_types(ledger: object, session: object, limits: object) -> None:
    """Raise ConfigError if one of these arguments of a run is neither None nor of its type."""
    if ledger is not None and not hasattr(ledger, "append"):
        raise ConfigError(f"ledger: expected a ledger such as SqliteLedger(path), got {type(ledger).__name__}.")
    if session is not None and not isinstance(session, Session):
        raise ConfigError(f"session: expected a session such as MemorySession(), got {type(session).__name__}.")
    if limits is not None and not isinstance(limits, Limits):
        raise ConfigError(f"limits: expected Limits, got {type(limits).__name__}.")


def choose_ledger(ledger: Ledger | None, durable: Ledger | None) -> Ledger | None:
    """Return the ledger, also if it was passed under its former name."""
    if durable is None:
        return ledger
    if ledger is not None:
        raise ConfigError("Pass the ledger as 'ledger' only: 'durable' is its former name.")
    warn_deprecated("durable", "ledger", stacklevel=4)
    return durable


def warn_deprecated(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn about a former name of a parameter, at the line that has called the agent."""
    warnings.warn(f"The parameter '{old}' is called '{new}' now.", DeprecationWarning, stacklevel=stacklevel)
