"""A watch for the client's disconnect while its request is served."""

import asyncio
from types import TracebackType

from antiphon.server.http import ClientDisconnected, HttpRequest

_WATCH_DELAY_SECONDS = 0.01


class DisconnectWatch:
    """A context manager that cancels its block when the client disconnects, and then raises ClientDisconnected.

    The body must have been read before. Cancelling is the only way to stop a generator that waits for its model.

    uvicorn's connection calls the watch. Other ASGI servers report a disconnect only to `receive`, so a task receives
    all further messages. Most responses that need no model are complete within a few milliseconds, so the task starts
    only after a short delay.
    """

    __slots__ = ("_disconnected", "_http_request", "_loop", "_owner", "_receiver", "_timer")

    def __init__(self, http_request: HttpRequest) -> None:
        self._http_request = http_request
        self._disconnected = False

    def __enter__(self) -> None:
        owner = asyncio.current_task()
        assert owner is not None, "a disconnect watch needs a task that it can cancel"
        self._owner = owner
        if self._http_request.watch_disconnect is not None:
            if not self._http_request.watch_disconnect(self._cancel):
                raise ClientDisconnected
        else:
            self._loop = asyncio.get_running_loop()
            self._receiver: asyncio.Task[None] | None = None
            self._timer = self._loop.call_later(_WATCH_DELAY_SECONDS, self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._http_request.watch_disconnect is not None:
            self._http_request.watch_disconnect(None)
        else:
            self._timer.cancel()
            if self._receiver is not None:
                self._receiver.cancel()
        if self._disconnected:
            self._owner.uncancel()
            raise ClientDisconnected from None

    def _start(self) -> None:
        self._receiver = self._loop.create_task(self._receive())

    async def _receive(self) -> None:
        while (await self._http_request.receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        self._disconnected = True
        self._owner.cancel()
