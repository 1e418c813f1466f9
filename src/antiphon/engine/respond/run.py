"""One response from its first event to its last: the only generator there is. `stream: false` drains it."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from antiphon.engine.items import CALL_TYPES
from antiphon.engine.prepare.prepare import Resolved
from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.protocol.events import Event
from antiphon.protocol.hosted import McpApprovalRequest, ToolSearchCall
from antiphon.protocol.response import Response, Usage
from antiphon.protocol.unions import Unknown
from antiphon.store.base import LeaseLost
from antiphon.stream.composer import Composer, IllegalDelta
from antiphon.stream.deltas import Delta, Deltas, Failure, Finish, TokenUsage

logger = logging.getLogger(__name__)

READER_PATIENCE_SECONDS = 2.0

# What a client has to answer before anything else can be said.
_ASKING = (*CALL_TYPES, ToolSearchCall, McpApprovalRequest)

Events = AsyncGenerator[Sequence[Event | Unknown], None]


class Postponed(Exception):
    """The run cannot come to its end now: another attempt does, and nothing is told of this one."""


class Keeper(Protocol):
    """Where a run leaves what it came to."""

    async def finish(self, response: Response, last: Sequence[Event | Unknown]) -> None:
        """Keep the final response; `last` are the events that will tell of it once this returns.

        Raises LeaseLost or Postponed if this is not the run's end. If it raises anything else, the run has failed.
        """

    async def abandon(self, run: "Run") -> None:
        """The run was closed before its end."""


class Run:
    """A response under way. `begun` is what it was at first, `response` what it is now, and `warnings` is what the
    client should know about it.

    `told` are deltas of an earlier attempt at the same response: they are composed again, and the model goes on.
    """

    def __init__(self, resolved: Resolved, deltas: Deltas, keeper: Keeper, *, told: Sequence[Delta] = ()) -> None:
        self.warnings = resolved.warnings
        self.request = resolved.turn.request
        self.begun = resolved.response
        self._ended = asyncio.Event()
        self._end_callbacks: list[Callable[[], object]] = []
        self._deltas = deltas
        self._keeper = keeper
        self._told = told
        self._composer = Composer(resolved.response, new_id=resolved.mint, now=lambda: int(time.time()))
        self._interruption: list[Delta] = []
        self._reader: asyncio.Task[object] | None = None
        self._waiting: asyncio.Task[object] | None = None

    @property
    def response(self) -> Response:
        return self._composer.response

    @property
    def finished(self) -> bool:
        """Whether the model has come to its end, though the last events may still be on their way."""
        return self._composer.finished

    async def events(self) -> Events:
        """Batches of events. The last one leaves only after the response is kept. Closing this stops the model.

        One task reads it from beginning to end.
        """
        composer = self._composer
        self._reader = asyncio.current_task()
        try:
            yield [*composer.start(), *composer.compose(self._told)]
            while True:
                told = self._tell(await self._next_batch())
                if composer.finished:
                    break
                if told:  # not everything a model says is told
                    yield told
            yield await self._keep(told)
        finally:
            await self._leave()

    async def drain(self) -> Response:
        """Run to the end and give the final response."""
        async for _ in self.events():
            pass
        return self.response

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call this when the run is over, however it ended."""
        self._end_callbacks.append(callback)

    async def end_by_cancelling(self) -> None:
        """Cancel, and wait for the end. A reader that has stopped reading does not hold it up for long."""
        self.cancel()
        try:
            async with asyncio.timeout(READER_PATIENCE_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            if self._reader is not None:
                self._reader.cancel()
            await self._ended.wait()

    def stop(self) -> None:
        """End soon, as a failure: the server is going down."""
        self._interrupt(Failure("The server is shutting down.", "server_shutdown"))

    def cancel(self) -> None:
        """End soon, with what there is: the response is no longer wanted."""
        self._interrupt(Finish("cancelled"))

    def steer(self) -> None:
        """Make room for what the client wants to say: end soon, with what there is.

        Calls are not cut off. They come to their end, and the client's words wait for their outputs.
        """
        if not self._composer.has_calls and not any(isinstance(item, _ASKING) for item in self._composer.output):
            self._interrupt(Finish("steered"))

    def take_sequence_number(self) -> int:
        """The number for an event that belongs to this response but does not come from its model."""
        return self._composer.take_sequence_number()

    def close_as_cancelled(self) -> Response:
        """End now, without telling anyone."""
        self._tell([Finish("cancelled")])
        return self.response

    async def _leave(self) -> None:
        """Whatever happens on the way out, what there is is kept, and those who wait for the end hear of it."""
        try:
            try:
                await self._deltas.aclose()
            finally:
                if not self._composer.finished:
                    await asyncio.shield(self._keeper.abandon(self))
        finally:
            self._ended.set()
            for callback in self._end_callbacks:
                callback()

    def _interrupt(self, ending: Delta) -> None:
        self._interruption.append(ending)
        waiting, self._waiting = self._waiting, None  # once is enough
        if waiting is not None:
            waiting.cancel()

    async def _next_batch(self) -> Sequence[Delta]:
        """The model's next words; whatever goes wrong while waiting for them is a failure the client is told of."""
        if self._interruption:
            return self._interruption[:1]
        task = self._waiting = self._reader
        try:
            return await anext(self._deltas)
        except StopAsyncIteration:
            return [Failure("The model's answer broke off.", "model_error", "model_error")]
        except Postponed:
            raise
        except AntiphonError as error:
            return [Failure(error.message, error.code or "server_error", error.type, error.param)]
        except asyncio.CancelledError:
            if not self._interruption or task is None:
                raise
            task.uncancel()
            return self._interruption[:1]
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
            return error.events if self._composer.finished else self._composer.fail(error.events, _UNEXPECTED)

    async def _keep(self, told: list[Event | Unknown]) -> Sequence[Event | Unknown]:
        """What cannot be kept has failed, since nobody could build on it; that it failed is kept if it can be."""
        try:
            await self._keeper.finish(self.response, told)
        except (LeaseLost, Postponed):  # it is not ours to end, or not now
            raise
        except Exception as error:
            logger.exception("the response could not be stored", extra={"response_id": self.response.id})
            reason = f": {error.message}" if isinstance(error, InvalidRequest) else "."
            told = self._composer.replace_terminal(told, Failure(f"The response could not be stored{reason}"))
            with suppress(Exception):
                await self._keeper.finish(self.response, told)
        return told


async def prepare_only() -> Deltas:
    """What no model says: the response of a request that only prepares the next one."""
    yield [TokenUsage(Usage(0, 0, 0)), Finish()]


_UNEXPECTED = Failure("The server had an error while answering. Its log says more.")
