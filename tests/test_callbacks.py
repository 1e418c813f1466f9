"""Functions of a program that an agent calls."""

import asyncio
from typing import Any

import pytest

from antiphon.callbacks import call_callback


async def await_cancelled_task(*_: Any) -> None:
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    waiting.cancel()
    await waiting


async def test_synchronous_and_asynchronous_functions_return_their_results() -> None:
    async def add(first: int, second: int) -> int:
        return first + second

    assert await call_callback(add, 1, 2) == await call_callback(sum, (1, 2)) == 3


async def test_cancellation_within_a_function_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a task that it awaits was cancelled"):
        await call_callback(await_cancelled_task)


async def test_cancelled_caller_is_cancelled() -> None:
    started = asyncio.Event()

    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    calling = asyncio.ensure_future(call_callback(wait))
    await started.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
