"""A clock for an event loop on which both sides of a test run: the time in which neither has anything to do."""

import asyncio
import time
from typing import Any

RESOLUTION = 1e-6


def count_idle_time(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, time passes for the loop's timers only while it waits.

    A machine may stand still for longer than the short time-outs of a test. Without this, they would run out before the
    other side, which stood still as well, has had its turn.
    """
    selector: Any = loop._selector  # type: ignore[attr-defined]
    select = selector.select
    passed = loop.time()

    def wait(timeout: float | None = None) -> Any:
        nonlocal passed
        began = time.monotonic()
        ready = select(timeout)
        waited = time.monotonic() - began
        # Advance at least by the clock's resolution: a timer that is due by rounding alone would never become due.
        passed += max(RESOLUTION, waited if timeout is None else min(waited, timeout))
        return ready

    selector.select = wait
    loop.time = lambda: passed  # type: ignore[method-assign]
