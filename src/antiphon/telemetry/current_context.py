"""The current context of OpenTelemetry, read and set without its functions.

OpenTelemetry holds the current context in a context variable. Its functions take ten times as long as the variable, and
a request needs several of them. Programs can replace this storage; then the functions are used.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

NO_CONTEXT = Context()

# OpenTelemetry stores the current span under this key.
(SPAN_KEY,) = trace.set_span_in_context(trace.INVALID_SPAN, NO_CONTEXT)


def _find_variable() -> ContextVar[Mapping[str, Any]] | None:
    """Return the variable of OpenTelemetry, or None if it stores the context somewhere else."""
    probe = Context({"antiphon": "probe"})
    token = contexts.attach(probe)
    try:
        return next((variable for variable, value in copy_context().items() if value is probe), None)
    finally:
        contexts.detach(token)


_variable = _find_variable()

read_context: Callable[[], Mapping[str, Any]] = contexts.get_current if _variable is None else _variable.get
"""Return the current context."""

set_context: Callable[[Mapping[str, Any]], Any] = contexts.attach if _variable is None else _variable.set
"""Set the current context, and return a token for `reset_context`."""

reset_context: Callable[[Any], None] = contexts.detach if _variable is None else _variable.reset
"""Restore the context before `set_context`. Raises ValueError if it was called in another task."""


def make_context(span: Span) -> Context:
    """Return a context with a span and nothing else.

    The class of OpenTelemetry only adds that it cannot be changed. It takes four times as long.
    """
    return {SPAN_KEY: span}


def find_current_span() -> Span | None:
    """Return the current span, or None if there is none."""
    return read_context().get(SPAN_KEY)


class CurrentSpan:
    """Makes a span the current one in a `with` block. The block must not yield to the caller of a generator.

    A generator with `contextmanager` takes three times as long.
    """

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._token = set_context({**read_context(), SPAN_KEY: self._span})

    def __exit__(self, *_: object) -> None:
        reset_context(self._token)
