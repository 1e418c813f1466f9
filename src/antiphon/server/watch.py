"""Noticing that a client went away while the model works for it."""

import asyncio
from types import TracebackType

from antiphon.server.exchange import ClientGone, Exchange

_MOMENT = 0.01


class Watch:
    """Within `with Watch(exchange):` a disconnect ends whatever is being awaited, and the block raises ClientGone.

    The body must have been read before: from here on the watch alone listens. Cancelling is the one way to reach a
    generator that is waiting for its model.

    Listening takes a task. Most answers that come from no model are there before one has been worth its price, so it
    starts only after a moment.
    """

    __slots__ = ("_exchange", "_gone", "_listener", "_loop", "_owner", "_timer")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gone = False
        self._listener: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        owner = asyncio.current_task(self._loop)
        assert owner is not None, "a watch needs a task that it can cancel"
        self._owner = owner
        self._timer = self._loop.call_later(_MOMENT, self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()
        if self._gone:
            self._owner.uncancel()
            raise ClientGone from None

    def _start(self) -> None:
        self._listener = self._loop.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._owner.cancel()
