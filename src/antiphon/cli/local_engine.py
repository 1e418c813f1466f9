"""An engine in this process, for a chat without a server."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from antiphon.cli.server_client import Events
from antiphon.config.settings import DEFAULT_PROJECT, Settings
from antiphon.engine.assembly import build_engine
from antiphon.protocol.events import Event
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.runtime import EngineThread

# A signal that arrives just before a wait is handled only after it, so waits are short.
MAX_WAIT_SECONDS = 0.2

T = TypeVar("T")
Batch = Sequence[Event | Unknown]


class LocalEngine:
    """An engine in a thread of its own, with the interface of `ServerClient`.

    Python delivers signals to the main thread only. Ctrl-C therefore interrupts the wait for events in that thread and
    never the event loop. Leaving the wait cancels the response.
    """

    def __init__(self, settings: Settings) -> None:
        engine = build_engine(settings)
        self._thread = EngineThread(lambda: engine)
        # Held by the current response. The next response waits until it is released.
        self._response_lock = asyncio.Lock()
        try:
            self._engine = _await(self._thread.submit(self._thread.get_engine()))
        except BaseException:
            self._thread.close(cancel_start=True)
            _await(self._thread.closed)
            raise

    def models(self) -> list[str]:
        return [model.id for model in self._engine.models()]

    def stream(self, request: CreateRequest) -> Events:
        batches: SimpleQueue[Batch | None] = SimpleQueue()
        response = self._thread.submit(self._read(request, batches.put))
        response.add_done_callback(lambda _: batches.put(None))
        try:
            while (batch := _take(batches)) is not None:
                yield from batch
            response.result()
        finally:
            response.cancel()

    def close(self) -> None:
        self._thread.close()
        _await(self._thread.closed)

    async def _read(self, request: CreateRequest, put: Callable[[Batch], None]) -> None:
        async with self._response_lock:
            run = await self._engine.create(request, project=DEFAULT_PROJECT)
            async with aclosing(run.events()) as batches:
                async for batch in batches:
                    put(batch)


def _await(future: Future[T]) -> T:
    """Return the result of a future. An interrupt cancels it."""
    ended: SimpleQueue[None] = SimpleQueue()
    future.add_done_callback(lambda _: ended.put(None))
    try:
        _take(ended)
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _take(queue: SimpleQueue[T]) -> T:
    """Wait for the next entry of a queue.

    An interrupt cannot leave the queue locked. It could leave a `Future` locked, for which the event loop would then
    wait for ever.
    """
    while True:
        with suppress(Empty):
            return queue.get(timeout=MAX_WAIT_SECONDS)
