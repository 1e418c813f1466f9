"""Work of large requests, in threads: the event loop must not run it.

A request is large if its body, or the history that it continues, has more than `LARGE_BYTES` or `LARGE_COUNT` items.
The code that finds this out calls `mark_large` in the task of the request. From then on, the steps of the request that
take time in proportion to its size run in a thread:

    prepared = await run_in_thread(prepare, items) if is_large() else prepare(items)

All other requests take the second branch, which costs no switch of threads.

Few threads share this work, so that large requests together take a bounded share of the processor. A thread gives the
interpreter lock to the event loop every few milliseconds, but not within one call of C code, such as decoding a body.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

LARGE_BYTES = 256 * 1024
"""Decoding and preparing a request of this size takes about 10 ms in the worst case."""

LARGE_COUNT = 2000
"""A history with more items is large, too."""

MAX_THREADS = 2

_large: ContextVar[bool] = ContextVar("large", default=False)
_executor: ThreadPoolExecutor | None = None

is_large = _large.get


def mark_large(*, is_large: bool = True) -> None:
    """Mark the request of the current task as large, or as not large if a task serves several requests."""
    _large.set(is_large)


async def run_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread and return its result. Cancelling the await does not stop the thread.

    The function must use nothing that the event loop changes at the same time.
    """
    return await asyncio.get_running_loop().run_in_executor(_get_executor(), function, *arguments)


async def run(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function, in a thread if the request of the current task is large."""
    return await run_in_thread(function, *arguments) if _large.get() else function(*arguments)


async def run_sized(size: int, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that takes `size` bytes of input, in a thread if they are many. Then the request is large."""
    if size <= LARGE_BYTES:
        return function(*arguments)
    _large.set(True)
    return await run_in_thread(function, *arguments)


def _get_executor() -> ThreadPoolExecutor:
    global _executor  # noqa: PLW0603 - created at the first use, because most processes need none
    if _executor is None:
        _executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="offload")
    return _executor
