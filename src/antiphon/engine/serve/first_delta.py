"""Waiting for a model's first words, but not for ever: a client that streams wants to hear that it was heard."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from antiphon.backends.base import Turn
from antiphon.engine.serve.routing import Route, Serving
from antiphon.stream.deltas import Delta, Deltas

logger = logging.getLogger(__name__)


async def open_turn(route: Route, turn: Turn, *, patience: float | None) -> "Serving | LateDeltas":
    """Begin the turn, and wait until it has begun, or at most as long as `patience` says.

    Within that time what goes wrong is raised. After it, that is raised by the deltas, as everything that goes wrong
    later is.
    """
    if patience is None:
        return await route.start(turn)
    starting = asyncio.ensure_future(route.start(turn))
    try:
        await asyncio.sleep(0)  # a model in this process begins at once, and a wait for it costs more than it
        if not starting.done():
            await asyncio.wait((starting,), timeout=patience)
    except asyncio.CancelledError:
        await _call_off(starting)
        raise
    return starting.result() if starting.done() else LateDeltas(starting)


async def _call_off(starting: "asyncio.Task[Serving]") -> None:
    starting.cancel()
    await asyncio.wait((starting,))
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().deltas.aclose()


class LateDeltas(AsyncGenerator[Sequence[Delta], None]):
    """The deltas of a turn that is still to begin. They say first who serves it."""

    def __init__(self, starting: "asyncio.Task[Serving]") -> None:
        self._starting = starting
        self._begun: Deltas | None = None

    async def asend(self, value: None) -> Sequence[Delta]:
        if self._begun is not None:
            return await anext(self._begun)
        # Whoever waits may be told to stop waiting, and the model must then not go on alone: `aclose` sees to it.
        serving = await asyncio.shield(self._starting)
        self._begun = serving.deltas
        for note in serving.notes:  # the headers, which could have told, have left
            logger.warning("%s", note)
        return (serving.told,)

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Sequence[Delta]:
        await self.aclose()
        raise kind

    async def aclose(self) -> None:
        if self._begun is not None:
            await self._begun.aclose()
        else:
            await _call_off(self._starting)
