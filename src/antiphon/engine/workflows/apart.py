"""Threads that nobody waits for at the end of a process: they may be stuck in a database that does not answer."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run_apart(step: Callable[[], T]) -> asyncio.Future[T]:
    """What this gives, or raises. To give up waiting for it does not end it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[Any], None], what: Any) -> None:
        if not outcome.cancelled():
            how(what)

    def run() -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            try:
                found = step()
            except Exception as error:
                loop.call_soon_threadsafe(settle, outcome.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, outcome.set_result, found)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return outcome
