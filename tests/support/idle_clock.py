"""Clocks for an event loop with both sides of a test: timeouts do not depend on the speed of the machine."""

import asyncio
import time
from typing import Any

RESOLUTION = 1e-6


def count_idle_time(loop: asyncio.AbstractEventLoop) -> None:
    """Make time pass for the loop's timers only while the loop waits.

    A busy machine may pause for longer than the short timeouts of a test. Without this they would expire before the
    other side has run.
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


def pass_time(seconds: float) -> None:
    """Let this time pass at once for the timers of the running event loop: the test decides when a timeout expires."""
    loop = asyncio.get_running_loop()
    read = loop.time
    loop.time = lambda: read() + seconds  # type: ignore[method-assign]
