"""The time limit for the first delta of a streamed response.

A client that streams needs a sign of life. When the limit has passed, the stream begins without its model, and an error
that would have been an HTTP error becomes an error event.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from types import TracebackType
from typing import Any

from antiphon.engine.serve.routing import Serving
from antiphon.stream.deltas import Delta, Deltas

logger = logging.getLogger(__name__)


async def wait_for_start(start: Coroutine[Any, Any, Serving], *, seconds: float) -> Serving:
    """Await the start of a model call for at most `seconds`.

    Errors within the limit are raised here. After it, the returned deltas wait for the start and raise its errors.
    """
    starting = asyncio.ensure_future(start)
    try:
        await asyncio.sleep(0)  # an embedded model starts at once, and a wait with a timer costs more than that
        if not starting.done():
            await asyncio.wait((starting,), timeout=seconds)
    except asyncio.CancelledError:
        await _cancel(starting)
        raise
    return starting.result() if starting.done() else Serving(LateDeltas(starting), None)


async def _cancel(starting: "asyncio.Task[Serving]") -> None:
    starting.cancel()
    await asyncio.wait((starting,))
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().deltas.aclose()


class LateDeltas(AsyncGenerator[Sequence[Delta], None]):
    """The deltas of a model call that has not started yet. The first batch names the model."""

    def __init__(self, starting: "asyncio.Task[Serving]") -> None:
        self._starting = starting
        self._started: Deltas | None = None

    async def asend(self, value: None) -> Sequence[Delta]:
        if self._started is not None:
            return await anext(self._started)
        # Cancelling this wait must not leave the model running: `aclose` cancels the start.
        serving = await asyncio.shield(self._starting)
        self._started = serving.deltas
        for warning in serving.warnings:  # too late for the response headers
            logger.warning("%s", warning)
        return await anext(self._started) if serving.served is None else (serving.served,)

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Sequence[Delta]:
        await self.aclose()
        raise kind

    async def aclose(self) -> None:
        if self._started is not None:
            await self._started.aclose()
        else:
            await _cancel(self._starting)
