"""The beginning of a streamed response: how long it waits for its model.

Before the stream begins, an error of the upstream becomes an HTTP error, which clients handle best. After that it
becomes an error event. But a client must not wait too long for the stream to begin. So a stream waits for the first
delta, within the time limit of the settings. If the upstream has answered before, the stream begins when the upstream
accepts the request, or after a short time in which most refusals of a nearby server arrive.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self

import msgspec

from antiphon.backends.base import Turn
from antiphon.engine.serve.routing import Candidate, ModelRoute, Serving
from antiphon.stream.deltas import Delta, Deltas

logger = logging.getLogger(__name__)

KNOWN_UPSTREAM_SECONDS = 0.05
"""Maximum wait for an upstream that has answered before."""

Start = Callable[[Turn], Coroutine[Any, Any, Serving]]


class FirstDelta:
    """Starts model calls, and waits until their streams may begin. Remembers the backends that have answered."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    async def start(self, start: Start, route: ModelRoute, turn: Turn, *, seconds: float) -> Serving:
        """Start the model call of a turn and wait for its first delta, for at most `seconds`.

        Errors within the limit are raised here. After it, the returned deltas wait for the start and raise its errors.
        """
        backend = route.first.name
        loop = asyncio.get_running_loop()
        # One future for all three reasons to begin: `asyncio.wait` costs twice as much.
        begun: asyncio.Future[None] = loop.create_future()

        def begin(_: object = None) -> None:
            if not begun.done():
                begun.set_result(None)

        is_known = backend in self._known
        starting = loop.create_task(self._start(start, turn, backend, begin if is_known else None))
        starting.add_done_callback(begin)
        try:
            await asyncio.sleep(0)  # an embedded model starts at once, and a wait with a timer costs more than that
            if not starting.done():
                timer = loop.call_later(min(seconds, KNOWN_UPSTREAM_SECONDS) if is_known else seconds, begin)
                try:
                    await begun
                finally:
                    timer.cancel()
        except asyncio.CancelledError:
            await _cancel(starting)
            raise
        if starting.done():
            try:
                return starting.result()
            finally:
                del starting  # its error refers to this frame
        # With several candidates it is not certain yet which one will answer.
        candidate = route.first if len(route.candidates) == 1 else None
        warnings = tuple(turn.warnings)
        return Serving(LateDeltas(starting, sent_warnings=warnings, candidate=candidate), candidate, warnings)

    async def _start(self, start: Start, turn: Turn, backend: str, on_accepted: Callable[[], None] | None) -> Serving:
        is_accepted = False

        def accept() -> None:
            nonlocal is_accepted
            is_accepted = True
            if on_accepted is not None:
                on_accepted()

        serving = await start(msgspec.structs.replace(turn, on_accepted=accept))
        if is_accepted:
            self._known.add(backend)
        return serving


async def _cancel(starting: "asyncio.Task[Serving]") -> None:
    starting.cancel()
    await asyncio.wait((starting,))
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().deltas.aclose()


class LateDeltas:
    """The deltas of a model call that has not started yet.

    The first batch names the model, unless the `candidate` that serves it was certain before.
    """

    def __init__(
        self, starting: "asyncio.Task[Serving]", *, sent_warnings: Sequence[str], candidate: Candidate | None
    ) -> None:
        self._starting: asyncio.Task[Serving] | None = starting
        self._sent_warnings = sent_warnings
        self._candidate = candidate
        self._started: Deltas | None = None

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[Sequence[Delta]]:
        # Not a coroutine: later reads need no other layer.
        return self._read_first() if self._started is None else self._started.__anext__()

    async def _read_first(self) -> Sequence[Delta]:
        # Cancelling this wait must not leave the model running: `aclose` cancels the start.
        starting = self._starting
        if starting is None:  # it has failed
            raise StopAsyncIteration
        try:
            serving = starting.result() if starting.done() else await asyncio.shield(starting)
        finally:
            if starting.done() and (starting.cancelled() or starting.exception() is not None):
                self._starting = None
            del starting  # its error refers to this frame
        self._started = serving.deltas
        for warning in serving.warnings:
            if warning not in self._sent_warnings:  # too late for the response headers
                logger.warning("%s", warning)
        served = None if serving.candidate is self._candidate else serving.served
        return await anext(self._started) if served is None else (served,)

    async def aclose(self) -> None:
        if self._started is not None:
            await self._started.aclose()
        elif self._starting is not None:
            await _cancel(self._starting)
