"""Large requests in threads."""

import asyncio
import threading

import pytest

from antiphon import offload


@pytest.mark.parametrize(("size", "is_large"), [(offload.LARGE_BYTES, False), (offload.LARGE_BYTES + 1, True)])
async def test_size_decides_the_thread_and_marks_the_task(size: int, is_large: bool) -> None:
    async def serve() -> tuple[bool, bool]:
        sized = await offload.run_sized(size, threading.get_ident)
        later = await offload.run(threading.get_ident)
        assert sized == later or is_large
        return sized != threading.get_ident(), offload.is_large()

    assert await asyncio.create_task(serve()) == (is_large, is_large)
    assert not offload.is_large()


async def test_error_of_the_function_is_raised() -> None:
    offload.mark_large()
    with pytest.raises(ZeroDivisionError):
        await offload.run(divmod, 1, 0)
    offload.mark_large(is_large=False)
    with pytest.raises(ZeroDivisionError):
        await offload.run(divmod, 1, 0)


async def test_event_loop_runs_while_a_thread_works() -> None:
    started, ended = threading.Event(), threading.Event()

    def work() -> str:
        started.set()
        assert ended.wait(60)
        return "done"

    offload.mark_large()
    task = asyncio.create_task(offload.run(work))
    assert await asyncio.to_thread(started.wait, 60)
    ended.set()
    assert await task == "done"
