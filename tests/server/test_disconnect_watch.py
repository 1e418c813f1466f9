import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.server.disconnect_watch import DisconnectWatch
from antiphon.server.http import WATCH_DISCONNECT, ClientDisconnected, HttpRequest

DISCONNECT = {"type": "http.disconnect"}


def wait_forever() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_disconnect_cancels_the_block(make_channel: Any) -> None:
    with (
        pytest.raises(ClientDisconnected),
        DisconnectWatch(make_channel({"type": "http.request"}, DISCONNECT).make_request()),
    ):
        await wait_forever()
    await asyncio.sleep(0)  # the task is no longer cancelled and can wait again


async def test_block_completes_while_the_client_is_connected(make_channel: Any) -> None:
    with DisconnectWatch(make_channel().make_request()):
        await asyncio.sleep(0)


async def test_error_in_the_block_is_raised(make_channel: Any) -> None:
    with pytest.raises(ValueError, match="why"), DisconnectWatch(make_channel().make_request()):
        raise ValueError("why")


async def test_block_that_ignores_cancellation_still_raises_disconnect(make_channel: Any) -> None:
    with pytest.raises(ClientDisconnected), DisconnectWatch(make_channel(DISCONNECT).make_request()):
        try:
            await wait_forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0)


async def test_other_cancellation_is_not_swallowed(make_channel: Any) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        with DisconnectWatch(make_channel().make_request()):
            entered.set()
            await wait_forever()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class DisconnectExtension:
    """The extension of a server that calls a function when the client disconnects."""

    def __init__(self, *, connected: bool = True) -> None:
        self.connected = connected
        self.callback: Callable[[], None] | None = None

    def watch(self, callback: Callable[[], None] | None) -> bool:
        self.callback = callback
        return self.connected

    def make_request(self, channel: Any) -> HttpRequest:
        scope = {"method": "POST", "path": "/", "query_string": b"", "headers": []}
        extensions = {WATCH_DISCONNECT: {"watch": self.watch}}
        return HttpRequest({**scope, "extensions": extensions}, channel.receive, channel.send)


async def test_disconnect_extension_cancels_the_block(make_channel: Any) -> None:
    extension = DisconnectExtension()
    with pytest.raises(ClientDisconnected), DisconnectWatch(extension.make_request(make_channel())):
        assert extension.callback is not None
        asyncio.get_running_loop().call_soon(extension.callback)
        await wait_forever()
    assert extension.callback is None
    await asyncio.sleep(0)  # the task is no longer cancelled and can wait again


async def test_disconnect_before_the_block_skips_it(make_channel: Any) -> None:
    extension = DisconnectExtension(connected=False)
    with pytest.raises(ClientDisconnected), DisconnectWatch(extension.make_request(make_channel())):
        pytest.fail("the block was entered")
