"""The watchdog of the event loop: logs each block, with the stack of the loop's thread during the block.

A thread checks the CPU time of the loop's thread, four times in each threshold, and half as often if the loop is idle.
If the loop is busy, and after every fourth check, it sends the loop a callback. If the loop does not run the callback
within the threshold, the loop is blocked: another callback runs too long, or waits. The thread samples the
stack while the block lasts, and logs the block when it ends. CPU work that is half as long again as the threshold is
always seen, and a call that waits if it is three times as long.

A slow machine also delays answers. A block is therefore logged only if one of these holds:

- the loop's thread used the threshold in CPU time, or
- the time that is left exceeds the threshold, after subtracting the time in which the thread waited for a processor
  (known on Linux) or in which the whole process did not run (it was stopped, or the machine was suspended).
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from types import FrameType
from typing import NamedTuple

logger = logging.getLogger(__name__)

_CHECKS_PER_THRESHOLD = 4
_CHECKS_PER_PING = 4
# A block that lasts longer is also logged before it ends. It may never end.
_REPORT_UNFINISHED_SECONDS = 1.0
# The number of lines in a minute. After that, only a block that is longer by this factor than those before is logged.
_LINES_PER_MINUTE = 10
_LONGER = 1.5
_MAX_FRAMES = 20


class _Reading(NamedTuple):
    """The clocks at one time. `cpu` and `waited` are of the loop's thread, `process_cpu` is of all threads."""

    time: float
    cpu: float
    waited: float
    process_cpu: float


class _Ping:
    """A callback in the loop. `answer` runs in the loop's thread and records when it did.

    `begun` has the clocks at the earliest possible begin of the block.
    """

    def __init__(self, begun: _Reading) -> None:
        self.begun = begun
        self.answered: float | None = None
        self.answered_cpu = 0.0
        self.oversleep = 0.0
        self.stack = ""
        self.stack_age = 0.0
        self.is_reported = False

    def answer(self) -> None:
        self.answered_cpu = time.thread_time()
        self.answered = time.monotonic()


class Watchdog:
    """Watches one event loop from a thread. `start` must be called in the loop's thread."""

    def __init__(self, threshold_seconds: float) -> None:
        self._threshold = threshold_seconds
        self._interval = threshold_seconds / _CHECKS_PER_THRESHOLD
        self._running = threading.Lock()  # released by `stop`; waiting for a lock is cheaper than for an event
        self._thread: threading.Thread | None = None
        self._budget = _LineBudget()

    def start(self) -> None:
        if self._threshold > 0:
            self._running.acquire()
            arguments = (asyncio.get_running_loop(), _ThreadClock())
            self._thread = threading.Thread(target=self._watch, args=arguments, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._running.release()
            self._thread.join(1)
            self._thread = None

    def _watch(self, loop: asyncio.AbstractEventLoop, clock: "_ThreadClock") -> None:
        with contextlib.closing(clock), contextlib.suppress(RuntimeError):  # the loop is closed
            self._check_regularly(loop, clock)

    def _check_regularly(self, loop: asyncio.AbstractEventLoop, clock: "_ThreadClock") -> None:
        ping: _Ping | None = None
        pause, checks, last = self._interval, 0, clock.read()
        while not self._running.acquire(timeout=pause):
            now = clock.read()
            late = now.time - last.time - pause
            if ping is not None:
                ping.oversleep += max(0.0, late)
                self._examine(ping, now, clock)
                ping = None if ping.answered is not None else ping
            if ping is None:
                checks += 1
                used = now.cpu - last.cpu
                pause = self._interval if used > self._interval / 10 else 2 * self._interval
                if late >= self._interval or used >= self._interval / 2:
                    ping = self._antedate(now, last, late, clock)
                elif checks % _CHECKS_PER_PING == 0:
                    ping = _Ping(now)
                if ping is not None:
                    loop.call_soon_threadsafe(ping.answer)
            last = now

    def _antedate(self, now: _Reading, last: _Reading, late: float, clock: "_ThreadClock") -> _Ping:
        """Return a ping for a block that may have begun before now.

        A busy loop may be blocked since the last check. A call that holds the interpreter lock also stops this thread:
        then the check is late, and the block has begun when it was due, at the latest.
        """
        if late < self._interval:
            return _Ping(last)
        # The CPU time of the pause before the due time may be from other callbacks and does not count.
        pause = now.time - last.time - late
        cpu = min(now.cpu, last.cpu + pause)
        ping = _Ping(_Reading(now.time - late, cpu, last.waited, min(now.process_cpu, last.process_cpu + pause)))
        ping.oversleep = late
        ping.stack, ping.stack_age = clock.format_stack(), late
        return ping

    def _examine(self, ping: _Ping, now: _Reading, clock: "_ThreadClock") -> None:
        age = (ping.answered or now.time) - ping.begun.time
        if ping.answered is None:
            # The loop's thread runs on meanwhile. Samples at growing distances follow it with little cost.
            if age >= max(self._threshold / 2, 2 * ping.stack_age):
                ping.stack, ping.stack_age = clock.format_stack(), age
            if age < _REPORT_UNFINISHED_SECONDS or ping.is_reported:
                return
        elif age < self._threshold:
            return
        cpu = (now.cpu if ping.answered is None else ping.answered_cpu) - ping.begun.cpu
        waited = now.waited - ping.begun.waited
        # If the process used no CPU time while this thread overslept, the process did not run.
        stopped = ping.oversleep - (now.process_cpu - ping.begun.process_cpu)
        blocked = max(cpu, age - max(waited, stopped))
        if blocked >= self._threshold and self._budget.take(blocked):
            ping.is_reported = True
            self._log(ping, age=age, cpu=cpu, waited=waited)

    def _log(self, ping: _Ping, *, age: float, cpu: float, waited: float) -> None:
        logger.warning(
            "the event loop %s blocked for %d ms, with %d ms of CPU time in its thread and %d ms waiting for a "
            "processor%s; stack after %d ms, innermost first: %s",
            "has been" if ping.answered is None else "was",
            age * 1000,
            cpu * 1000,
            waited * 1000,
            self._budget.describe_skipped(),
            ping.stack_age * 1000,
            ping.stack or "not known",
        )


class _LineBudget:
    """Limits the lines in a minute, and counts the blocks without a line."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._lines = 0
        self._longest = 0.0
        self._skipped = 0

    def take(self, seconds: float) -> bool:
        """Return True if a block of this length gets a line."""
        now = time.monotonic()
        if now - self._started >= 60:
            self._started, self._lines, self._longest = now, 0, 0.0
        if self._lines >= _LINES_PER_MINUTE and seconds < _LONGER * self._longest:
            self._skipped += 1
            return False
        self._lines += 1
        self._longest = max(self._longest, seconds)
        return True

    def describe_skipped(self) -> str:
        skipped, self._skipped = self._skipped, 0
        return f" (and {skipped} blocks before it that were not logged)" if skipped else ""


class _ThreadClock:
    """The times and the stack of the thread that creates it, to be read from another thread."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        has_clock = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(self._ident) if has_clock else None
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def read(self) -> _Reading:
        """Return the clocks. Times that the system does not know are 0."""
        cpu = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        # The second number is the time in which the thread was ready and had no processor.
        waited = 0.0 if self._file < 0 else int(os.pread(self._file, 100, 0).split()[1]) / 1e9
        return _Reading(time.monotonic(), cpu, waited, time.process_time())

    def format_stack(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self._ident)
        lines: list[str] = []
        while frame is not None and len(lines) < _MAX_FRAMES:
            lines.append(f"{frame.f_globals.get('__name__', '?')}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        return ", ".join(lines)
