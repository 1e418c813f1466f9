"""One response from its first event to its last: the only generator there is. `stream: false` drains it."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence

from antiphon.backends.base import Deltas
from antiphon.engine.conversation import Resolved
from antiphon.errors import AntiphonError
from antiphon.protocol.events import Event
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import Response
from antiphon.store.base import Store, StoredResponse
from antiphon.stream.composer import Composer, IllegalDelta
from antiphon.stream.deltas import Delta, Failure

logger = logging.getLogger(__name__)

Events = AsyncGenerator[Sequence[Event | Unknown], None]


class Run:
    """A response under way. `response` is what it is now; `warnings` is what the client should know about it."""

    def __init__(self, resolved: Resolved, deltas: Deltas, *, project: str, store: Store, running: set["Run"]) -> None:
        self.warnings = resolved.warnings
        self._input = resolved.input
        self._deltas = deltas
        self._project = project
        self._store = store
        self._running = running
        self._composer = Composer(resolved.response, new_id=resolved.mint, now=lambda: int(time.time()))
        self._waiting: asyncio.Task[object] | None = None
        self._stopping = asyncio.Event()

    @property
    def response(self) -> Response:
        return self._composer.response

    async def events(self) -> Events:
        """Batches of events. The last one leaves only after the store has the response.

        Closing this generator stops the model; what it has said by then is kept as a cancelled response.
        """
        composer = self._composer
        self._running.add(self)
        try:
            yield composer.start()
            while True:
                told = self._tell(await self._next_batch())
                if composer.finished:
                    break
                yield told
            yield await self._keep(told)
        finally:
            self._running.discard(self)
            await self._deltas.aclose()
            if not composer.finished:
                composer.cancel()
                await asyncio.shield(self._keep([]))

    async def drain(self) -> Response:
        """Run to the end and give the final response."""
        async for _ in self.events():
            pass
        return self.response

    def stop(self) -> None:
        """End soon, with a terminal event: the server is going down."""
        self._stopping.set()
        if self._waiting is not None:
            self._waiting.cancel()

    async def _next_batch(self) -> Sequence[Delta]:
        """The model's next words; whatever goes wrong while waiting for them is a failure the client is told of."""
        if self._stopping.is_set():
            return [_SHUTDOWN]
        task = self._waiting = asyncio.current_task()
        try:
            return await anext(self._deltas)
        except StopAsyncIteration:
            return [Failure("The model's answer broke off.", "model_error", "model_error")]
        except AntiphonError as error:
            return [Failure(error.message, error.code or "server_error", error.type, error.param)]
        except asyncio.CancelledError:
            if not self._stopping.is_set() or task is None:
                raise
            task.uncancel()
            return [_SHUTDOWN]
        except Exception:
            logger.exception("the backend failed", extra={"response_id": self.response.id})
            return [_UNEXPECTED]
        finally:
            self._waiting = None

    def _tell(self, batch: Sequence[Delta]) -> list[Event | Unknown]:
        try:
            return self._composer.compose(batch)
        except IllegalDelta as error:
            logger.exception("the backend's deltas make no sense", extra={"response_id": self.response.id})
            if self._composer.finished:
                return error.told
            return error.told + self._composer.compose([_UNEXPECTED])

    async def _keep(self, told: list[Event | Unknown]) -> list[Event | Unknown]:
        """Store the response, so that the next request can build on it. What cannot be kept has failed."""
        if not self.response.store:
            return told
        try:
            await self._store.save(self._project, StoredResponse(response=self.response, input=self._input))
        except Exception:
            logger.exception("the response could not be stored", extra={"response_id": self.response.id})
            return self._composer.retract(told, _NOT_STORED) if told else told
        return told


_UNEXPECTED = Failure("The server had an error while answering. Its log says more.")
_NOT_STORED = Failure("The response could not be stored.")
_SHUTDOWN = Failure("The server is shutting down.", "server_shutdown")
