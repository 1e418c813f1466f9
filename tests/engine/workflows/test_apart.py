import asyncio
import threading

import pytest

from antiphon.engine.workflows.apart import run_apart


async def test_a_step_runs_in_a_thread_that_keeps_no_process_alive() -> None:
    thread = await run_apart(threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.daemon


async def test_what_it_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_apart(lambda: 1 // 0)


async def test_whoever_gives_up_waiting_is_not_waited_for() -> None:
    gate, ended = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def step() -> None:
        gate.wait()
        loop.call_soon_threadsafe(ended.set)

    waiting = run_apart(step)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await ended.wait()


def test_a_loop_that_is_closed_is_told_nothing() -> None:
    gate = threading.Event()

    async def leave() -> None:
        run_apart(gate.wait)

    asyncio.run(leave())
    (thread,) = (each for each in threading.enumerate() if each.name == "apart")
    gate.set()
    thread.join()
