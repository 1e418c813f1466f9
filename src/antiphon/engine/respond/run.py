"""A response from its first event to its last: the only generator of events. `stream: false` drains it.

Every error after the first event ends in a failed response, and so does a failure to store the response.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from antiphon import offload
from antiphon.engine.items import CALL_TYPES
from antiphon.engine.respond.ids import Mint
from antiphon.errors import AntiphonError, InvalidRequest, StoreUnavailable
from antiphon.protocol.events import Event
from antiphon.protocol.hosted import McpApprovalRequest, ToolSearchCall
from antiphon.protocol.items import Item
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response, Usage
from antiphon.protocol.unions import Unknown
from antiphon.store.base import LeaseLost
from antiphon.store.encoded_response import EncodedResponse
from antiphon.stream.composer import Composer, IllegalDelta
from antiphon.stream.deltas import Delta, Deltas, Failure, Finish, TokenUsage
from antiphon.stream.limits import AnswerLimits

logger = logging.getLogger(__name__)

# Time that a cancelled run waits for its reader to take the last events.
READER_TIMEOUT_SECONDS = 2.0

# Output items that require a client reply before the next turn.
_AWAITING_CLIENT = (*CALL_TYPES, McpApprovalRequest)

_DEFAULT_LIMITS = AnswerLimits()
_UNEXPECTED = Failure("The server had an internal error. See the server's log.")

Events = AsyncGenerator[Sequence[Event | Unknown], None]


class Postponed(Exception):
    """The run cannot end now. Another attempt will end it, and this one emits nothing more."""


class ResponseSink(Protocol):
    """The destination of a finished response."""

    async def save(self, response: Response, last_events: Sequence[Event | Unknown]) -> None:
        """Save the final response. `last_events` are emitted after this returns.

        Raises LeaseLost or Postponed if the run must not end here. Any other error fails the response.
        """

    async def discard(self, run: "Run") -> None:
        """Handle a run that was closed before its end."""


class Run:
    """A response in progress.

    `begun` is the response as it began, and `response` its current state. `replayed` are the deltas of an earlier
    attempt: they are composed again, and `deltas` continue them. An answer that exceeds `limits` fails.
    `encoded` has the JSON of the final response if it was encoded to be saved.
    `input_items` are those of a foreground response.
    """

    def __init__(
        self,
        begun: Response,
        deltas: Deltas,
        sink: ResponseSink,
        *,
        request: CreateRequest,
        mint: Mint,
        warnings: Sequence[str] = (),
        replayed: Sequence[Delta] = (),
        limits: AnswerLimits = _DEFAULT_LIMITS,
        encoded: EncodedResponse | None = None,
        input_items: Sequence[Item | Unknown] = (),
    ) -> None:
        self.begun = begun
        self.input_items = input_items
        self.request = request
        self.warnings = warnings
        self.encoded = encoded
        self._deltas = deltas
        self._sink = sink
        self._replayed = replayed
        self._composer = Composer(begun, new_id=mint.new_id, now=lambda: int(time.time()), limits=limits)
        self._compose_batch = self._composer.compose
        self._is_over = False
        self._end_callbacks: list[Callable[[], object]] = []
        self._interruption: list[Delta] = []
        self._reader: asyncio.Task[object] | None = None
        self._waiting: asyncio.Task[object] | None = None

    @property
    def response(self) -> Response:
        return self._composer.response

    @property
    def usage(self) -> Usage | None:
        """The usage that the model has reported."""
        return self._composer.usage

    @property
    def finished(self) -> bool:
        """True if the model has finished. The last events may not have been read yet."""
        return self._composer.finished

    async def events(self) -> Events:
        """Yield batches of events. The last batch follows after the response is saved. Closing stops the model.

        A single task must read the generator from beginning to end.
        """
        composer, deltas = self._composer, self._deltas
        self._reader = asyncio.current_task()
        try:
            begun = composer.start()
            yield [*begun, *composer.compose(self._replayed)] if self._replayed else begun
            while True:
                self._waiting = self._reader
                try:
                    batch: Sequence[Delta] = self._interruption[:1] or await anext(deltas)
                except BaseException as error:
                    ending = self._find_ending(error)
                    if ending is None:
                        raise
                    batch = ending
                finally:
                    self._waiting = None
                events = self._compose(batch)
                if composer.finished:
                    break
                if events:  # some deltas produce no event
                    yield events
            yield await self._save(events)
        finally:
            await self._leave()

    async def drain(self) -> Response:
        """Run to the end and return the final response. Events that nobody reads are not made."""
        self._compose_batch = self._composer.compose_silently
        async for _ in self.events():
            pass
        return self.response

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the run is over, however it ended."""
        self._end_callbacks.append(callback)

    async def cancel_and_wait(self) -> None:
        """Cancel the run and wait for its end. A reader that has stopped reading is cancelled after a short wait."""
        if self._is_over:
            return
        over = asyncio.Event()
        self._end_callbacks.insert(0, over.set)  # called even if another callback raises
        self.cancel()
        try:
            async with asyncio.timeout(READER_TIMEOUT_SECONDS):
                await over.wait()
        except TimeoutError:
            if self._reader is not None:
                self._reader.cancel()
            await over.wait()

    def stop(self) -> None:
        """End soon with a failure, because the server shuts down."""
        self._interrupt(Failure("The server is shutting down.", "server_shutdown"))

    def cancel(self) -> None:
        """End soon as cancelled, with the output so far."""
        self._interrupt(Finish("cancelled"))

    def steer(self) -> None:
        """End soon with the output so far, so that the client's new input can follow.

        Tool calls are not interrupted: they are completed, and the new input waits for their outputs.
        """
        if not self._composer.has_calls and not any(map(_awaits_client, self._composer.output)):
            self._interrupt(Finish("steered"))

    def split_output(self, item_count: int) -> tuple[list[Item | Unknown], list[Item | Unknown]] | None:
        """Return the output before the last model call and that of the call. None if `usage` includes the call.

        `item_count` is the number of items before the first call.
        """
        if self._composer.open_from is None:
            return None
        start = max(self._composer.open_from, item_count)
        output = self._composer.output
        return output[:start], output[start:]

    def take_sequence_number(self) -> int:
        """Return the next sequence number, for an event that does not come from the model."""
        return self._composer.take_sequence_number()

    def close_as_cancelled(self) -> Response:
        """End now as cancelled, without emitting events."""
        self._compose([Finish("cancelled")])
        return self.response

    async def _leave(self) -> None:
        """Stop the model, save an unfinished response, and notify everyone who waits for the end."""
        try:
            try:
                await self._deltas.aclose()
            finally:
                if not self._composer.finished:
                    await asyncio.shield(self._sink.discard(self))
        finally:
            self._is_over = True
            # These refer to this run.
            self._reader = None
            callbacks, self._end_callbacks = self._end_callbacks, []
            for callback in callbacks:
                callback()

    def _interrupt(self, ending: Delta) -> None:
        self._interruption.append(ending)
        waiting, self._waiting = self._waiting, None  # cancel the wait only once
        if waiting is not None:
            waiting.cancel()

    def _find_ending(self, error: BaseException) -> Sequence[Delta] | None:
        """Return the end of a response whose next deltas could not be read. Return None if it must not end here."""
        if isinstance(error, StopAsyncIteration):
            return [Failure("The model's answer ended unexpectedly.", "model_error", "model_error")]
        if isinstance(error, LeaseLost):
            return None
        if isinstance(error, AntiphonError):
            return [Failure(error.message, error.code or "server_error", error.type, error.param)]
        if isinstance(error, asyncio.CancelledError) and self._interruption and self._reader is not None:
            self._reader.uncancel()
            return self._interruption[:1]
        if isinstance(error, Postponed) or not isinstance(error, Exception):
            return None
        logger.error("the backend failed", exc_info=error, extra={"response_id": self.response.id})
        return [_UNEXPECTED]

    def _compose(self, batch: Sequence[Delta]) -> list[Event | Unknown]:
        try:
            return self._compose_batch(batch)
        except IllegalDelta as error:
            logger.exception("the backend sent deltas in an illegal order", extra={"response_id": self.response.id})
            return error.events if self._composer.finished else self._composer.fail(error.events, _UNEXPECTED)

    async def _save(self, events: list[Event | Unknown]) -> Sequence[Event | Unknown]:
        """Save the response and return its last events.

        If saving fails, replace the terminal event with a failure and try to save that.
        """
        if self._composer.content_size > offload.LARGE_BYTES:  # the closing events, the store and the client repeat it
            offload.mark_large()
        if self._composer.is_cut_off:
            await self._deltas.aclose()  # before the response is saved: an endless answer must not go on meanwhile
        try:
            await self._sink.save(self.response, events)
        except (LeaseLost, Postponed):
            raise
        except StoreUnavailable as error:
            logger.error("the response could not be stored: %s", error.message, extra={"response_id": self.response.id})
            failure = Failure(f"The response could not be stored: {error.message}", error.code or "server_error")
        except InvalidRequest as error:  # a client has deleted its conversation, which is not a fault of the server
            logger.info("the response could not be stored: %s", error.message, extra={"response_id": self.response.id})
            failure = Failure(f"The response could not be stored: {error.message}")
        except Exception:
            logger.exception("the response could not be stored", extra={"response_id": self.response.id})
            failure = Failure("The response could not be stored.")
        else:
            return events
        events = self._composer.replace_terminal(events, failure)
        with suppress(Exception):
            await self._sink.save(self.response, events)
        return events


def _awaits_client(item: Item | Unknown) -> bool:
    if isinstance(item, ToolSearchCall):  # the server's own searches have no call id
        return item.call_id is not None
    return isinstance(item, _AWAITING_CLIENT)


async def empty_answer() -> Deltas:
    """Yield the answer to a request with `generate: false`: no output and no tokens."""
    yield [TokenUsage(Usage(0, 0, 0)), Finish()]
