"""The stream that a run returns: its events, and then its outcome."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from antiphon.agent.journal import Journal
from antiphon.agent.outcome import Outcome, OutputT_co, RunEvent, RunEvents
from antiphon.protocol.json_text import JsonObject

T = TypeVar("T")


class OutcomeHolder:
    """Receives the outcome of a run. A stream and the generator of its events share it.

    `journal` and `close_history` are those of the run, once it has begun.
    """

    outcome: Outcome[Any] | None = None
    journal: Journal | None = None
    close_history: Callable[[], list[JsonObject]] = staticmethod(list)


class RunStream(AsyncGenerator[RunEvent, None], Generic[OutputT_co]):
    """The events of a run. Closing the stream, or leaving its loop, cancels the run.

    The generator of the events has no reference to the stream. So a reader that leaves the stream without closing it
    ends the run at once, without waiting for the garbage collector.
    """

    def __init__(self, events: RunEvents, holder: OutcomeHolder) -> None:
        self._events = events
        self._holder = holder

    @property
    def outcome(self) -> Outcome[OutputT_co]:
        """The outcome of the run. Raises RuntimeError before the last event."""
        if self._holder.outcome is None:
            raise RuntimeError("The run has not ended: read its events first.")
        return self._holder.outcome

    def __aiter__(self) -> RunEvents:
        # A loop over the stream reads the generator itself, without a call in between for every event.
        return self._events

    def __anext__(self) -> Coroutine[Any, Any, RunEvent]:
        return self._events.__anext__()

    def asend(self, value: None) -> Coroutine[Any, Any, RunEvent]:
        return self._events.asend(value)

    def athrow(self, *error: Any) -> Coroutine[Any, Any, RunEvent]:
        return self._events.athrow(*error)

    def aclose(self) -> Coroutine[Any, Any, None]:
        return self._events.aclose()


def run_in_new_loop(work: Callable[[], Awaitable[T]], close: Callable[[], Awaitable[None]]) -> T:
    """Run `work`, and then `close`, in an event loop of its own. Connections belong to the loop and end with it."""

    async def run_and_close() -> T:
        try:
            return await work()
        finally:
            await close()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run_and_close())
    raise RuntimeError("An event loop is running in this thread: await the run instead.")
