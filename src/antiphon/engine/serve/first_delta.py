"""The beginning of a streamed response: how long it waits for its model.

A client that streams needs a sign of life. Before the stream begins, an error of the upstream becomes an HTTP error,
which clients handle best. Later it becomes an error event. So a stream waits for the first delta, within the time limit
of the settings. If the upstream has answered before, the stream begins when the upstream accepts the request, or after
a short time in which most refusals of a nearby server arrive.
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
OnPending = Callable[[Serving], Callable[[], bool] | None]
"""Called while a known upstream works on the request, with the result of the start if nothing changes it.

The function that it returns is called when the upstream has accepted the request. It returns True if it has begun the
client's stream. Later errors are then raised by the deltas only.
"""


class FirstDelta:
    """Starts model calls, and waits until their streams may begin. Remembers the backends that have answered."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    async def start(
        self, start: Start, route: ModelRoute, turn: Turn, *, seconds: float, on_pending: OnPending | None = None
    ) -> Serving:
        """Start the model call of a turn and wait for its first delta, for at most `seconds`.

        Errors within the limit are raised here. After it, the returned deltas wait for the start and raise its errors.
        """
        backend = route.first.name
        is_known = backend in self._known
        loop = asyncio.get_running_loop()
        beginning = _Beginning(turn, loop)
        starting = loop.create_task(self._start(start, turn, backend, beginning.accept if is_known else None))
        starting.add_done_callback(beginning.end)
        # With several candidates it is not certain yet which one will answer.
        candidate = route.first if len(route.candidates) == 1 else None
        try:
            await asyncio.sleep(0)  # an embedded model starts at once, and a wait with a timer costs more than that
            if not starting.done():
                timer = loop.call_later(min(seconds, KNOWN_UPSTREAM_SECONDS) if is_known else seconds, beginning.end)
                try:
                    if is_known and candidate is not None and on_pending is not None:
                        beginning.announce(starting, candidate, on_pending)
                    await beginning.future
                finally:
                    timer.cancel()
        except BaseException:
            await _cancel(starting)
            raise
        return beginning.finish(starting, candidate)

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


class _Beginning:
    """The wait for the beginning of one stream. `future` is done when the stream may begin.

    It is one future for all reasons to begin: `asyncio.wait` costs twice as much.
    """

    __slots__ = ("_begin", "_is_begun", "_pending", "_turn", "future")

    def __init__(self, turn: Turn, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self._turn = turn
        self._pending: Serving | None = None
        self._begin: Callable[[], bool] | None = None
        self._is_begun = False  # the client has got the first events

    def announce(self, starting: "asyncio.Task[Serving]", candidate: Candidate, on_pending: OnPending) -> None:
        self._pending = _make_pending(starting, self._turn, candidate)
        self._begin = on_pending(self._pending)

    def accept(self) -> None:
        """Begin now: the upstream has accepted the request."""
        if not self.future.done():
            if self._begin is not None and self._has_current_warnings():
                self._is_begun = self._begin()
            self.future.set_result(None)

    def end(self, _: object = None) -> None:
        """Begin: the start has ended, or has taken long enough."""
        if not self.future.done():
            self.future.set_result(None)

    def finish(self, starting: "asyncio.Task[Serving]", candidate: Candidate | None) -> Serving:
        """Return the result. Raises the error of the start if the stream has not begun."""
        if starting.done() and (not self._is_begun or _has_only(starting, self._turn.warnings)):
            return starting.result()
        if self._pending is not None and self._has_current_warnings():
            return self._pending
        return _make_pending(starting, self._turn, candidate)

    def _has_current_warnings(self) -> bool:
        return self._pending is not None and len(self._pending.warnings) == len(self._turn.warnings)


def _has_only(starting: "asyncio.Task[Serving]", warnings: Sequence[str]) -> bool:
    """Return True if a start has succeeded with these warnings."""
    return not starting.cancelled() and starting.exception() is None and starting.result().warnings == warnings


def _make_pending(starting: "asyncio.Task[Serving]", turn: Turn, candidate: Candidate | None) -> Serving:
    warnings = tuple(turn.warnings)
    return Serving(LateDeltas(starting, sent_warnings=warnings, candidate=candidate), candidate, warnings)


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
        self._starting = starting
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
        serving = starting.result() if starting.done() else await asyncio.shield(starting)
        self._started = serving.deltas
        for warning in serving.warnings:
            if warning not in self._sent_warnings:  # too late for the response headers
                logger.warning("%s", warning)
        served = None if serving.candidate is self._candidate else serving.served
        return await anext(self._started) if served is None else (served,)

    async def aclose(self) -> None:
        if self._started is not None:
            await self._started.aclose()
        else:
            await _cancel(self._starting)
