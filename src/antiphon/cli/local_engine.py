"""An engine in this process, for a chat without a server."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from antiphon.cli.server_client import Events
from antiphon.config import DEFAULT_PROJECT, Settings
from antiphon.engine.assembly import build_engine
from antiphon.protocol.events import Event
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown

# A signal that arrives just before a wait is handled only after it, so waits are short.
MAX_WAIT_SECONDS = 0.2

T = TypeVar("T")
Batch = Sequence[Event | Unknown]


class LocalEngine:
    """An engine on an event loop in its own thread, with the interface of `ServerClient`.

    Python delivers signals to the main thread only. Ctrl-C therefore interrupts the wait for events in that thread and
    never the event loop. Leaving the wait cancels the response.
    """

    def __init__(self, settings: Settings) -> None:
        self._engine = build_engine(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        # Held by the response in progress. The next response and `close` wait until it has cleaned up.
        self._turn = asyncio.Lock()
        try:
            self._run(self._engine.start())
        except BaseException:
            self._stop()
            raise

    def models(self) -> list[str]:
        return [model.id for model in self._engine.models()]

    def stream(self, request: CreateRequest) -> Events:
        batches: SimpleQueue[Batch] = SimpleQueue()
        response = asyncio.run_coroutine_threadsafe(self._produce(request, batches.put), self._loop)
        response.add_done_callback(lambda _: batches.put(()))  # ends the wait for a batch
        try:
            while not response.done() or not batches.empty():
                try:
                    batch = batches.get(timeout=MAX_WAIT_SECONDS)
                except Empty:
                    continue
                yield from batch
            response.result()
        finally:
            response.cancel()

    def close(self) -> None:
        try:
            self._run(self._close())
        finally:
            self._stop()

    async def _produce(self, request: CreateRequest, put: Callable[[Batch], None]) -> None:
        async with self._turn:
            run = await self._engine.create(request, project=DEFAULT_PROJECT)
            async with aclosing(run.events()) as batches:
                async for batch in batches:
                    put(batch)

    async def _close(self) -> None:
        async with self._turn:
            await self._engine.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while True:
            try:
                return running.result(MAX_WAIT_SECONDS)
            except TimeoutError:
                if running.done():
                    raise
            except BaseException:
                running.cancel()
                raise

    def _stop(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_other_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
