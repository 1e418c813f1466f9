"""Async context managers in a thread with an event loop of its own, for tests that are not async."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")

TIMEOUT = 30


@contextmanager
def run_in_thread(manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter the manager in a thread, and leave it there at the end of the block."""
    entered = threading.Event()
    values: list[T] = []
    ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        end = asyncio.Event()
        async with manager as value:
            values.append(value)
            ends.append((asyncio.get_running_loop(), end))
            entered.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert entered.wait(TIMEOUT)
    try:
        yield values[0]
    finally:
        loop, end = ends[0]
        loop.call_soon_threadsafe(end.set)
        thread.join(TIMEOUT)
