import asyncio
from typing import Any

import pytest

from antiphon.server.http import ClientGone, Watch

GONE = {"type": "http.disconnect"}


def forever() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_a_disconnect_ends_what_is_awaited(wire: Any) -> None:
    with pytest.raises(ClientGone), Watch(wire({"type": "http.request"}, GONE).exchange()):
        await forever()
    await asyncio.sleep(0)  # the task is no longer cancelled: it can wait again


async def test_a_client_that_stays_is_not_in_the_way(wire: Any) -> None:
    with Watch(wire().exchange()):
        await asyncio.sleep(0)


async def test_errors_pass(wire: Any) -> None:
    with pytest.raises(ValueError, match="why"), Watch(wire().exchange()):
        raise ValueError("why")


async def test_work_that_outlives_its_cancelling_still_ends_in_a_disconnect(wire: Any) -> None:
    with pytest.raises(ClientGone), Watch(wire(GONE).exchange()):
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0)


async def test_somebody_elses_cancelling_stays_one(wire: Any) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        with Watch(wire().exchange()):
            entered.set()
            await forever()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
