"""The stream that a run returns: its events, and then its outcome."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from antiphon.agent.journal import Journal
from antiphon.agent.outcome import Outcome, OutputT_co, RunEnded, RunEvent, RunEvents
from antiphon.protocol.json_text import JsonObject

T = TypeVar("T")


class OutcomeHolder:
    """Receives the outcome of a run. A stream and the generator of its events share it.

    `journal` and `close_history` are those of the run, once it has begun. `watcher` closes the stream with the event
    loop.
    """

    outcome: Outcome[Any] | None = None
    journal: Journal | None = None
    close_history: Callable[[], list[JsonObject]] = staticmethod(list)
    watcher: asyncio.Task[None] | None = None

    def stop_watcher(self) -> None:
        """Stop watching a run that ends, unless the watcher itself ends it."""
        if self.watcher is not None and self.watcher is not asyncio.current_task():
            self.watcher.cancel()


class RunStream(AsyncGenerator[RunEvent, None], Generic[OutputT_co]):
    """The events of a run. Closing the stream cancels the run, and so does leaving `async with`.

    The generator of the events has no reference to the stream. So a reader that drops the stream without closing it
    ends the run at once, without waiting for the garbage collector.
    """

    def __init__(self, events: RunEvents, holder: OutcomeHolder) -> None:
        self._events = events
        self._holder = holder

    @property
    def outcome(self) -> Outcome[OutputT_co]:
        """The outcome of the run. Raises RuntimeError before the last event."""
        if self._holder.outcome is None:
            raise RuntimeError(
                "The run has no outcome: its events were not read to the end. "
                "To stop it with an outcome, set the event that was passed as 'cancel'."
            )
        return self._holder.outcome

    def __aiter__(self) -> RunEvents:
        # A loop over the stream reads the generator itself, without a call in between for every event.
        if self._holder.watcher is None:
            self._holder.watcher = _watch(self._events)
        return self._events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __anext__(self) -> Coroutine[Any, Any, RunEvent]:
        return self._events.__anext__()

    def asend(self, value: None) -> Coroutine[Any, Any, RunEvent]:
        return self._events.asend(value)

    def athrow(self, *error: Any) -> Coroutine[Any, Any, RunEvent]:
        return self._events.athrow(*error)

    def aclose(self) -> Coroutine[Any, Any, None]:
        return self._events.aclose()


_watchers: set[asyncio.Task[None]] = set()


def _watch(events: RunEvents) -> asyncio.Task[None]:
    """Return a task that closes a stream when the event loop ends and cancels its tasks.

    If an exception of the reader ends the program, its traceback has a reference to the stream. Without the task,
    `asyncio.run` closes all generators inside of the stream at the same time, in no order, which fails.
    """
    loop = asyncio.get_running_loop()

    def stop(_: object) -> None:
        # The garbage collector may run in any thread.
        if not loop.is_closed():
            loop.call_soon_threadsafe(watcher.cancel)

    watcher = loop.create_task(_close_when_cancelled(weakref.ref(events, stop)))
    _watchers.add(watcher)
    watcher.add_done_callback(_watchers.discard)
    return watcher


async def _close_when_cancelled(reference: "weakref.ref[RunEvents]") -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        events = reference()
        # A reader that waits for the next event is cancelled too.
        if events is not None and not getattr(events, "ag_running", False):
            await events.aclose()


async def read_outcome(events: RunEvents, on_event: Callable[[RunEvent], object] | None = None) -> Outcome[Any]:
    """Read the events of a run to the end and return its outcome. `on_event` is called with each of them."""
    outcome: Outcome[Any] | None = None
    # The stream is closed here, so that it need not be watched.
    source = events._events if isinstance(events, RunStream) else events
    async with aclosing(source):
        async for event in source:
            if on_event is not None:
                on_event(event)
            if isinstance(event, RunEnded):
                outcome = event.outcome
    assert outcome is not None, "the last event of a run is RunEnded"
    return outcome


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
