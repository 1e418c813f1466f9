"""Calling what is not asynchronous, beside the event loop.

Each call has a thread of its own, which nobody has to wait for: a function that hangs takes no room from others, and
holds up neither the end of the loop nor that of the process.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], *, name: str) -> T:
    """What the work returns or raises. If this is cancelled, the work goes on, but nobody hears of it."""
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
        # The loop may be closed by the time that the work is done.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    def run() -> None:
        try:
            result = work()
        except StopIteration as error:
            # A future cannot carry it.
            post(None, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            post(None, error)
        else:
            post(result, None)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    return await done
