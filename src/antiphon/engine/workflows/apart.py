"""Threads that nobody waits for at the end of a process: they may be stuck in a database that does not answer."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def run_apart(step: Callable[[], T]) -> asyncio.Future[T]:
    """What this gives, or raises. To give up waiting for it does not end it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(found: T | None, error: Exception | None) -> None:
        if not outcome.cancelled():
            outcome.set_result(found) if error is None else outcome.set_exception(error)  # type: ignore[arg-type]

    def run() -> None:
        found, failure = None, None
        try:
            found = step()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(settle, found, failure)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return outcome
