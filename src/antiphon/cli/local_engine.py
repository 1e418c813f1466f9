"""The engine in this very process, for a chat without a server."""

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

# An interrupt that comes in the moment before a wait is noticed only after it: so no wait is long.
LONGEST_WAIT_SECONDS = 0.2

T = TypeVar("T")
Batch = Sequence[Event | Unknown]


class LocalEngine:
    """Asked like a remote server.

    The engine's loop turns in a thread of its own. Signals reach the main thread alone, so a Ctrl-C never comes in the
    midst of the loop's work: it ends the waiting here, which cancels the answer there.
    """

    def __init__(self, settings: Settings) -> None:
        self._engine = build_engine(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        # Held by the answer under way. The next one, and the end, wait until it has cleared up behind itself.
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
        answer = asyncio.run_coroutine_threadsafe(self._answer(request, batches.put), self._loop)
        answer.add_done_callback(lambda _: batches.put(()))  # ends the waiting
        try:
            while not answer.done() or not batches.empty():
                try:
                    batch = batches.get(timeout=LONGEST_WAIT_SECONDS)
                except Empty:
                    continue
                yield from batch
            answer.result()
        finally:
            answer.cancel()

    def close(self) -> None:
        try:
            self._run(self._close())
        finally:
            self._stop()

    async def _answer(self, request: CreateRequest, put: Callable[[Batch], None]) -> None:
        async with self._turn:
            run = await self._engine.create(request, project=DEFAULT_PROJECT)
            async with aclosing(run.events()) as batches:
                async for batch in batches:
                    put(batch)

    async def _close(self) -> None:
        async with self._turn:
            await self._engine.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return running.result(LONGEST_WAIT_SECONDS)
            except TimeoutError:
                if running.done():
                    raise
            except BaseException:
                running.cancel()
                raise

    def _stop(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
