"""Noticing that a client went away while the model works for it."""

import asyncio
from types import TracebackType

from antiphon.server.exchange import ClientGone, Exchange


class Watch:
    """Within `with Watch(exchange):` a disconnect ends whatever is being awaited, and the block raises ClientGone.

    The body must have been read before: from here on the watch alone listens. Cancelling is the one way to reach a
    generator that is waiting for its model.
    """

    __slots__ = ("_exchange", "_gone", "_listener", "_owner")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gone = False

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        owner = asyncio.current_task(loop)
        assert owner is not None, "a watch needs a task that it can cancel"
        self._owner = owner
        self._listener = loop.create_task(self._listen())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.cancel()
        if self._gone:
            self._owner.uncancel()
            raise ClientGone from None

    async def _listen(self) -> None:
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._owner.cancel()
