"""Programs in processes: time, memory outside the heap, and the end of the process."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("py_mini_racer")

from antiphon.config.tools import ProgramSettings
from antiphon.errors import RateLimited, Unavailable
from antiphon.tools.hosted.program.messages import CallResult, ProgramStep, ToolRequest
from antiphon.tools.hosted.program.runner import ProgramRunner


def open_program(runner: ProgramRunner, code: str, project: str = "p") -> Any:
    return runner.open(project, code=code, tools=["get"], text_tools=[], clock_ms=0, seed=0)


async def test_endless_loop_is_stopped_after_its_time() -> None:
    runner = ProgramRunner(ProgramSettings(seconds=60))
    async with open_program(runner, "await tools.get({}); while (true) {}") as program:
        assert await program.start() == ProgramStep(calls=[ToolRequest(0, "get", "{}")])
        assert 0 < program._left < 60
        program._left = 0.5  # not before: the first step may take long on a busy machine
        step = await program.resume([CallResult(0, "1")])
    assert step == ProgramStep(is_done=True, error="The program ran longer than 60 seconds.")


async def test_memory_outside_the_heap_is_limited() -> None:
    runner = ProgramRunner(ProgramSettings(memory_bytes=16 * 1024 * 1024))
    code = "const kept = []; for (let i = 0; i < 64; i++) kept.push(new Uint8Array(2 ** 28).fill(1)); text('done')"
    async with open_program(runner, code) as program:
        step = await program.start()
    assert step.is_done
    assert step.output == ""
    assert step.error


async def test_programs_beyond_the_limit_wait_and_are_refused() -> None:
    runner = ProgramRunner(ProgramSettings(processes=1, queued=4, queue_seconds=0.1))
    async with open_program(runner, ""):
        with pytest.raises((Unavailable, RateLimited)):
            async with open_program(runner, ""):
                pass
    runner.close()
    with pytest.raises(Unavailable):
        async with open_program(runner, ""):
            pass


async def test_cancelled_program_ends_its_process() -> None:
    runner = ProgramRunner(ProgramSettings(processes=1))

    async def loop_forever() -> None:
        async with open_program(runner, "while (true) {}") as program:
            started.set()
            await program.start()

    started = asyncio.Event()
    task = asyncio.create_task(loop_forever())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with open_program(runner, "text('next')") as program:  # the only slot is free again
        assert await program.start() == ProgramStep(is_done=True, output="next")
