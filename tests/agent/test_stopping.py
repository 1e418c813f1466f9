"""The stopwatch: what is waited for is interrupted when it is time, and only then."""

import asyncio
import contextlib
import time

import pytest

from antiphon.agent.budget import Stop, StopTimer


def make(seconds: float | None = None, cancel: asyncio.Event | None = None) -> StopTimer:
    return StopTimer(None if seconds is None else time.time() + seconds, cancel, time.time)


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def test_what_is_done_in_time_is_given() -> None:
    for watch in (make(), make(60), make(cancel=asyncio.Event()), make(60, asyncio.Event())):
        assert [await watch.wait(lambda: give(7)) for _ in range(3)] == [7, 7, 7]
        watch.close()


async def test_at_the_deadline_the_work_is_cancelled() -> None:
    now, cancelled = 9.99, False
    watch = StopTimer(10.0, None, lambda: now)

    async def work() -> None:
        nonlocal now, cancelled
        try:
            await wait_for_ever()
        except asyncio.CancelledError:
            now, cancelled = 10.0, True
            raise

    with pytest.raises(Stop, match="deadline"):
        await watch.wait(work)
    assert cancelled
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    # It stays over.
    with pytest.raises(Stop, match="deadline"):
        await watch.wait(lambda: give(7))
    watch.close()


async def test_the_event_stops_the_work_and_what_comes_after() -> None:
    cancel = asyncio.Event()
    watch = make(60, cancel)
    asyncio.get_running_loop().call_soon(cancel.set)
    with pytest.raises(Stop, match="cancelled"):
        await watch.wait(wait_for_ever)
    with pytest.raises(Stop, match="cancelled"):
        watch.check()
    watch.close()


async def test_work_that_does_not_listen_is_waited_for() -> None:
    cancel = asyncio.Event()
    watch = make(cancel=cancel)

    async def work() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await wait_for_ever()
        return 7

    asyncio.get_running_loop().call_soon(cancel.set)
    with pytest.raises(Stop, match="cancelled"):
        await watch.wait(work)
    await asyncio.sleep(0)
    watch.close()


async def test_who_is_cancelled_by_somebody_else_is_cancelled() -> None:
    begun, cancel = asyncio.Event(), asyncio.Event()
    watch = make(60, cancel)

    async def work() -> None:
        begun.set()
        await wait_for_ever()

    waiting = asyncio.ensure_future(watch.wait(work))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    # Both at once count as that, too.
    begun.clear()
    waiting = asyncio.ensure_future(watch.wait(work))
    await begun.wait()
    cancel.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    watch.close()
