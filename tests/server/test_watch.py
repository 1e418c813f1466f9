import asyncio
from typing import Any

import pytest

from antiphon.server.http import ClientDisconnected, DisconnectWatch

GONE = {"type": "http.disconnect"}


def forever() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_a_disconnect_ends_what_is_awaited(make_channel: Any) -> None:
    with (
        pytest.raises(ClientDisconnected),
        DisconnectWatch(make_channel({"type": "http.request"}, GONE).make_request()),
    ):
        await forever()
    await asyncio.sleep(0)  # the task is no longer cancelled: it can wait again


async def test_a_client_that_stays_is_not_in_the_way(make_channel: Any) -> None:
    with DisconnectWatch(make_channel().make_request()):
        await asyncio.sleep(0)


async def test_errors_pass(make_channel: Any) -> None:
    with pytest.raises(ValueError, match="why"), DisconnectWatch(make_channel().make_request()):
        raise ValueError("why")


async def test_work_that_outlives_its_cancelling_still_ends_in_a_disconnect(make_channel: Any) -> None:
    with pytest.raises(ClientDisconnected), DisconnectWatch(make_channel(GONE).make_request()):
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0)


async def test_somebody_elses_cancelling_stays_one(make_channel: Any) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        with DisconnectWatch(make_channel().make_request()):
            entered.set()
            await forever()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
