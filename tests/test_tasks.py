import asyncio

from antiphon.tasks import cancel_tasks


async def test_cancelled_tasks_have_ended_and_their_errors_are_dropped() -> None:
    async def fail_at_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            raise ValueError

    waiting, failing = asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(fail_at_end())
    await asyncio.sleep(0)  # both have begun
    await cancel_tasks(waiting, None, failing)
    assert (waiting.cancelled(), type(failing.exception())) == (True, ValueError)
