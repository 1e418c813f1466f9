"""The watchdog: the blocks that it logs, their figures and stacks, and the delays that it does not log."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.server.watchdog import Watchdog, _LineBudget
from support.loop_blocks import assert_no_block, longest_block

THRESHOLD = 0.05
TIMEOUT = 60
FIGURES = re.compile(r"blocked for (\d+) ms, with (\d+) ms of CPU time in its thread and (\d+) ms waiting")


def spin_for(seconds: float) -> None:
    """Use this CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def wait_in_a_system_call(seconds: float) -> None:
    time.sleep(seconds)


def add_numbers() -> None:
    """Hold the interpreter lock in one call of C code, then stay on the stack until a late watchdog has run."""
    sum(range(20_000_000))
    spin_for(0.3)


async def run_watched(work: Callable[[], None]) -> None:
    """Run a function in a watched event loop, until the watchdog had time to log it."""
    watchdog = Watchdog(THRESHOLD)
    watchdog.start()
    try:
        await asyncio.sleep(THRESHOLD)  # the watchdog has sent its first ping
        work()
        await asyncio.sleep(2 * THRESHOLD)
    finally:
        watchdog.stop()


def figures(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int, int]]:
    return [
        (int(found[1]), int(found[2]), int(found[3]))
        for record in caplog.records
        if (found := FIGURES.search(record.getMessage()))
    ]


def test_cpu_work_is_logged_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(run_watched(lambda: spin_for(0.4)))
    *_, (wall, cpu, _) = figures(caplog)
    assert wall >= cpu
    assert 350 <= cpu < 1000
    assert re.search(r"innermost first: \S+test_watchdog:\d+ spin_for, ", caplog.records[0].getMessage())
    assert caplog.records[0].levelno == logging.WARNING


def test_blocking_call_is_logged_without_cpu_time(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(run_watched(lambda: wait_in_a_system_call(0.5)))
    *_, (wall, cpu, _) = figures(caplog)
    assert wall >= 300
    assert cpu < 100
    assert "wait_in_a_system_call" in caplog.records[0].getMessage()


def test_call_that_holds_the_interpreter_lock_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(run_watched(add_numbers))
    *_, (wall, cpu, _) = figures(caplog)
    assert wall >= cpu >= 50
    assert "add_numbers" in caplog.records[0].getMessage()


def test_block_without_end_is_logged_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    logged = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: logged.set()  # type: ignore[method-assign]
    logger = logging.getLogger("antiphon.server.watchdog")
    logger.addHandler(handler)
    try:
        asyncio.run(run_watched(lambda: _spin_until(logged)))
    finally:
        logger.removeHandler(handler)
    assert "the event loop has been blocked for" in caplog.records[0].getMessage()
    assert "_spin_until" in caplog.records[0].getMessage()


def _spin_until(event: threading.Event) -> None:
    end = time.monotonic() + TIMEOUT
    while not event.is_set() and time.monotonic() < end:
        pass


def test_short_work_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        for _ in range(20):
            spin_for(0.002)
            await asyncio.sleep(0)

    async def watch() -> None:
        watchdog = Watchdog(1.0)
        watchdog.start()
        await work()
        watchdog.stop()

    asyncio.run(watch())
    assert not figures(caplog)


def test_threshold_0_starts_no_thread() -> None:
    async def watch() -> list[str]:
        before = set(threading.enumerate())  # servers of other tests may have watchdogs
        watchdog = Watchdog(0)
        watchdog.start()
        names = [thread.name for thread in set(threading.enumerate()) - before]
        watchdog.stop()
        return names

    assert "watchdog" not in asyncio.run(watch())


STOPPED = textwrap.dedent("""
    import asyncio, logging, sys
    from antiphon.server.watchdog import Watchdog

    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)

    async def main():
        watchdog = Watchdog(0.05)
        watchdog.start()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(0.2)
        watchdog.stop()

    asyncio.run(main())
""")


def test_stopped_process_is_not_logged() -> None:
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(0.5)  # the time of the stop is the subject
        child.send_signal(signal.SIGCONT)
        assert child.communicate("\n", TIMEOUT)[0] == ""


def test_server_runs_a_watchdog(serve: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    logged = threading.Event()
    caplog.handler.addFilter(lambda record: logged.set() or True if FIGURES.search(record.getMessage()) else True)
    running = serve(log_block_ms=50)
    running.do(lambda: spin_for(0.3))
    assert logged.wait(TIMEOUT)


def test_lines_in_a_minute_are_limited_and_skipped_blocks_are_counted() -> None:
    budget = _LineBudget()
    assert [budget.take(0.1) for _ in range(15)] == [True] * 10 + [False] * 5
    assert budget.take(0.14) is False
    assert budget.take(0.2) is True
    assert budget.describe_skipped() == " (and 6 blocks before it that were not logged)"
    assert budget.describe_skipped() == ""


def test_helper_finds_the_longest_block_in_a_log() -> None:
    line = "warning the event loop was blocked for 900 ms, with {} ms of CPU time in its thread and 3 ms waiting\n"
    assert longest_block("") == 0
    assert longest_block(line.format(80) + line.format(420)) == 0.42
    assert_no_block(line.format(80))
    with pytest.raises(AssertionError, match="420 ms of CPU"):
        assert_no_block(line.format(420))
