"""Calls of the functions that a program passes to an agent: hooks, guardrails, filters, dynamic instructions."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def call_callback(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, synchronous or asynchronous, and return its result.

    Raises RuntimeError instead of a CancelledError of the function itself, for example of a task that it awaits. Such
    an error must not end the run as if its caller were cancelled.
    """
    try:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError as error:
        if is_cancelling():
            raise
        raise RuntimeError("a task that it awaits was cancelled") from error


def is_cancelling() -> bool:
    """Return True if the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
