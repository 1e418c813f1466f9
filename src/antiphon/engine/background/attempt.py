"""One attempt at a background response: the first one, or a later one that takes over from a dead process.

Events that a reader may have seen never change. If nobody has read the stream, the response begins again. Otherwise the
new attempt must reproduce the events that were sent and continue after them. If the model answers differently, the
response fails. There are never two versions of an event under one sequence number.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from antiphon import offload
from antiphon.engine.background.event_writer import EventWriter, LoggedEvents, end_log, read_log
from antiphon.engine.prepare.prepare import Accepted, Prepared
from antiphon.engine.respond.ids import Mint
from antiphon.engine.respond.persistence import conversation_for
from antiphon.engine.respond.run import Postponed, Run
from antiphon.engine.serve.hosted.journal import StepJournal, list_deltas
from antiphon.engine.serve.pipeline import Pipeline
from antiphon.engine.serve.routing import ModelStatus
from antiphon.engine.usage import UsageRecorder, find_model
from antiphon.errors import ModelNotFound, ServerError, StoreUnavailable
from antiphon.protocol.events import Event
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ClaimedRun, LeaseLost, RunKey, Store, StoredResponse
from antiphon.store.history_budget import HistoryBudget, HistoryBudgetExhausted
from antiphon.store.limits import SUSPECT_INTERRUPTIONS
from antiphon.stream.composer import Composer
from antiphon.stream.decompose import decompose_events
from antiphon.stream.deltas import Delta, Deltas, Failure, Finish, Served
from antiphon.stream.replay import Diverged, ReplayFilter
from antiphon.stream.sse import encode_json_line

logger = logging.getLogger(__name__)

# A response whose attempts kill their process is given up after this number of interruptions. During the last one, its
# process worked on no other suspect run (`SuspectFilter`).
MAX_INTERRUPTIONS = SUSPECT_INTERRUPTIONS + 2
# A finished response waits this long for a failing store, with one try per interval.
SAVE_TIMEOUT_SECONDS = 600.0
RETRY_SECONDS = 1.0
# Number of lease periods to wait before claiming another configuration's run, by the status of its model here.
LEASES_TO_WAIT: Mapping[ModelStatus, int] = {"listed": 0, "unlisted": 1, "unknown": 4}
# Retention of a response that could not be read: its own retention is unknown.
UNREADABLE_RETENTION_SECONDS = 24 * 3600

DIVERGED = Failure("The server was interrupted, and the model did not repeat its earlier answer.", "interrupted")
DAMAGED = Failure("The server was interrupted, and the stored events cannot be read.", "interrupted")
GIVEN_UP = Failure(
    f"The server was interrupted {MAX_INTERRUPTIONS} times while working on this response.", "interrupted"
)


class LeftToOthers(Postponed):
    """Another process may serve the model. The run is left to it until the run has been free for `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"left to other processes for {seconds} seconds")
        self.seconds = seconds


class Overloaded(Postponed):
    """There is no memory for the history of the run. It waits in the queue."""


class StoreFailed(Postponed):
    """The history of the run cannot be read now. It waits in the queue."""


class QueuedRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The stored form of a queued request: the prepared request, and the number of ids that its input used.

    `key_id` is the API key that the usage is counted for. `traceparent` is the span of the request that was accepted,
    if there are traces.
    """

    request: CreateRequest
    minted: int
    traceparent: str = ""
    key_id: str = ""


class Attempt:
    """Works on a claimed run. It is also the sink of the response.

    `lease` is the lease period, the unit of the time that a run is left to other processes.
    """

    def __init__(
        self,
        claimed: ClaimedRun,
        owner: str,
        store: Store,
        pipeline: Pipeline,
        *,
        lease: float,
        usage: UsageRecorder | None = None,
        histories: HistoryBudget | None = None,
    ) -> None:
        self._claimed = claimed
        self._share = (histories or HistoryBudget()).open(claimed.project)
        self._owner = owner
        self._store = store
        self._pipeline = pipeline
        self._lease = lease
        self._usage = usage
        self._key_id = ""
        self._prepared: Prepared | None = None
        self._stored: StoredResponse | None = None
        self._run: Run | None = None
        self._cancelled = claimed.cancelled
        self._saved = False
        self.is_lost = False  # set by the scheduler when another process has the run
        self.events = EventWriter(store, project=claimed.project, response_id=claimed.response_id, owner=owner)
        if claimed.attempt == 1:
            self.events.recover(0)

    @property
    def number(self) -> int:
        """1 for the first attempt at the run."""
        return self._claimed.attempt

    @property
    def is_grouped(self) -> bool:
        """True if the run is in the group of suspect runs, for which others may wait."""
        return self._claimed.interruptions >= SUSPECT_INTERRUPTIONS

    @property
    def is_watched(self) -> bool:
        """True if a reader may have followed the run before this attempt."""
        return self._claimed.watched

    def cancel(self) -> None:
        self._cancelled = True
        if self._run is not None:
            self._run.cancel()

    async def work(self) -> None:
        """Run the response to its end.

        Raises LeaseLost if another process has taken it over, LeftToOthers if another process should, and Overloaded,
        StoreFailed or StoreUnavailable if it has to wait.
        """
        try:
            with self._share:
                with _postpone_preparation():
                    await self._share.reserve_request(len(self._claimed.request))
                await self._begin()
        except (LeaseLost, LeftToOthers, Overloaded, StoreFailed):
            raise
        except Exception:
            # Without the stored response, an error may only be a short failure of the store: do not end the run yet.
            is_unwanted = self._cancelled and self._stored is not None
            if self._claimed.interruptions < MAX_INTERRUPTIONS and not is_unwanted:
                raise
            logger.exception("a background response was given up", extra={"response_id": self._claimed.response_id})
            await self._give_up()
        finally:
            self._run = None  # refers to this attempt: the garbage collector would free both much later

    async def _begin(self) -> None:
        stored = self._stored = await self._store.load(self._claimed.project, self._claimed.response_id)
        if stored is None:  # deleted while it was queued
            return
        log = await self._recover_log()
        if log.is_damaged:
            await self._fail(DAMAGED, log)
            return
        self.events.recover(log.next)
        response = self._begin_response()
        encoded = self._claimed.request
        queued = await offload.run_sized(len(encoded), partial(msgspec.json.decode, type=QueuedRequest), encoded)
        self._key_id = queued.key_id
        mint = Mint(response.id.removeprefix("resp_"), queued.minted)
        if log.events and not _can_reproduce(response, mint, log.events):
            await self._fail(DIVERGED, log)
            return
        try:
            earlier = await self._load_earlier(response.id, log)
        except StoreUnavailable:
            raise
        except (Diverged, ServerError) as error:
            await self._fail(DIVERGED if isinstance(error, Diverged) else DAMAGED, log)
            return
        accepted = Accepted(input=stored.input, mint=mint, is_suspect=self._claimed.interruptions > 0)
        key = RunKey(self._claimed.project, response.id)
        request = self._pipeline.credentials.restore(key, queued.request)
        with self._trace(queued.traceparent):
            await self._run_to_end(request, accepted, response, earlier)
        self._pipeline.credentials.forget(key)

    def _trace(self, traceparent: str) -> AbstractContextManager[object]:
        """Return the span of this attempt, or a context without effect if there are no traces."""
        telemetry = self._pipeline.telemetry
        if telemetry is None:
            return nullcontext()
        return telemetry.trace_attempt(self._claimed, traceparent, self._get_response)

    def _get_response(self) -> Response | None:
        return None if self._run is None else self._run.response

    async def _run_to_end(
        self, request: CreateRequest, accepted: Accepted, response: Response, earlier: "_Earlier"
    ) -> None:
        if not self._cancelled and self._claimed.interruptions < MAX_INTERRUPTIONS:  # ending it needs no model
            self._leave_to_others(self._pipeline.classify(request.model or ""))
        await self._save_progress(response)
        deltas = self._serve(request, accepted, earlier)
        limits = self._pipeline.answer_limits
        replayed = [*earlier.shown, *earlier.finished]
        self._run = Run(response, deltas, self, request=request, mint=accepted.mint, replayed=replayed, limits=limits)
        try:
            async with aclosing(self._run.events()) as batches:
                async for batch in batches:
                    if not self.events.ending:
                        self.events.write(batch)
        except (LeaseLost, asyncio.CancelledError):
            if self._usage is not None and self._prepared is not None:
                self._usage.start(self._record_deleted(self._usage, self._run, self._prepared))
            raise
        if not self._saved:
            raise ServerError(f"The response {response.id} could not be stored.")
        if self._pipeline.observer is not None:
            model = find_model(self._run.response, self._prepared)
            self._pipeline.observer.count_response(self._run.response, model)
        if self._usage is not None:
            self._usage.record_run(self._claimed.project, self._key_id, self._run, self._prepared)

    async def _record_deleted(self, usage: UsageRecorder, run: Run, prepared: Prepared) -> None:
        """Count the usage if the response was deleted. Otherwise another attempt ends the response and counts it."""
        project = self._claimed.project
        with suppress(StoreUnavailable):  # the store logs its failures
            if await self._store.load_bare_response(project, run.begun.id) is None:
                if not run.finished:
                    run.close_as_cancelled()
                usage.record_run(project, self._key_id, run, prepared)

    def _begin_response(self) -> Response:
        """Return the response as it was queued, or as much of it as is known if it cannot be read."""
        if self._stored is not None:
            return msgspec.structs.replace(self._stored.response, status="queued", output=[])
        claimed = self._claimed
        return Response(
            id=claimed.response_id, created_at=int(time.time()), status="queued", model=claimed.model, background=True
        )

    async def _recover_log(self) -> LoggedEvents:
        """Return the events of earlier attempts. Events of a run without readers are deleted instead."""
        project, response_id = self._claimed.project, self._claimed.response_id
        if self._claimed.attempt == 1 or await self._store.drop_events(project, response_id, owner=self._owner):
            return read_log([])
        return read_log(await self._store.read_events(project, response_id, -1))

    async def _save_progress(self, response: Response) -> None:
        """Save the status `in_progress`, for clients that poll."""
        assert self._stored is not None
        begun = msgspec.structs.replace(response, status="in_progress")
        stored = msgspec.structs.replace(self._stored, response=begun)
        await self._store.save(self._claimed.project, stored, owner=self._owner)

    async def _serve(self, request: CreateRequest, accepted: Accepted, earlier: "_Earlier") -> Deltas:
        """Yield the deltas that follow those of earlier attempts."""
        if self._cancelled:
            yield [Finish("cancelled")]
            return
        if self._claimed.interruptions >= MAX_INTERRUPTIONS:
            response_id = self._claimed.response_id
            logger.error("a background response was given up: %s", GIVEN_UP.message, extra={"response_id": response_id})
            yield [GIVEN_UP]
            return
        try:
            with _postpone_preparation():
                prepared = await self._pipeline.prepare_accepted(
                    request, accepted, project=self._claimed.project, share=self._share
                )
            self._prepared = prepared
            if earlier.journal.recorded and not prepared.is_hosted:
                raise ServerError("The hosted tools of this response are no longer available.", code="interrupted")
            serving = await self._pipeline.serve(prepared, replayed=earlier.shown, journal=earlier.journal)
        except ModelNotFound:  # not configured here any more, or unknown to the upstream
            self._leave_to_others("unknown")
            raise
        for warning in (*(f"history: {each}" for each in prepared.repairs), *serving.warnings):
            logger.warning("%s", warning, extra={"response_id": accepted.mint.response_id})
        candidate = serving.candidate or prepared.route.first
        yield [Served(candidate.model.id, candidate.name)]
        async with aclosing(serving.deltas) as deltas:
            async for batch in deltas:
                try:
                    yield earlier.filter.feed(batch)
                except Diverged:
                    yield [DIVERGED]
                    return

    async def _load_earlier(self, response_id: str, log: LoggedEvents) -> "_Earlier":
        """Return the part that earlier attempts have made. Raises Diverged if the journal does not match the log."""
        journal = StepJournal(self._store, project=self._claimed.project, response_id=response_id, owner=self._owner)
        if self._claimed.attempt > 1:
            await journal.load()
        shown = decompose_events(log.events)
        replay = ReplayFilter(shown)
        return _Earlier(shown, replay.feed(list_deltas(journal.recorded)), journal, replay)

    def _leave_to_others(self, status: ModelStatus) -> None:
        """Raise LeftToOthers while other processes still have time to claim the run.

        A run that was queued under this configuration is never left to others. A run of an old version names no model.
        """
        claimed = self._claimed
        seconds = LEASES_TO_WAIT[status] * self._lease
        if claimed.same_configuration or not claimed.model or not seconds:
            return
        if time.time() - claimed.free_since < seconds:
            raise LeftToOthers(seconds)

    async def _give_up(self) -> None:
        """End the response in spite of errors. If its log cannot be read, end it without last events."""
        log = None
        with suppress(ServerError):
            await self.events.prepare_end(())  # waits for the last flush
            log = read_log(await self._store.read_events(self._claimed.project, self._claimed.response_id, -1))
        await self._fail(GIVEN_UP, log)

    async def _fail(self, reason: Failure, log: LoggedEvents | None) -> None:
        """End a response whose log cannot be continued."""
        ended, last = end_log(self._begin_response(), log or read_log([]), None if self._cancelled else reason)
        await self._store_final(ended, None if log is None else (log.next, [encode_json_line(event) for event in last]))

    async def save(self, response: Response, last_events: Sequence[Event | Unknown]) -> None:
        """Save the final response together with its last events. Retry while the store fails."""
        final = await self.events.prepare_end(last_events)
        deadline = time.monotonic() + SAVE_TIMEOUT_SECONDS
        failures = 0
        while not self._saved:
            try:
                await self._store_final(response, final)
            except ServerError as error:
                if time.monotonic() > deadline:
                    raise Postponed("The store failed for too long.") from error
                if failures == 0:
                    with_traceback = not isinstance(error, StoreUnavailable)
                    logger.error(
                        "the response cannot be stored yet: %s",
                        error.message,
                        exc_info=with_traceback,
                        extra={"response_id": response.id},
                    )
                failures += 1
                await asyncio.sleep(RETRY_SECONDS)

    async def _store_final(self, response: Response, last: tuple[int, list[bytes]] | None) -> None:
        if self._stored is not None:
            stored = msgspec.structs.replace(self._stored, response=response)
        else:
            expires_at = int(time.time()) + UNREADABLE_RETENTION_SECONDS
            stored = StoredResponse(response=response, input=[], expires_at=expires_at)
        with self.events.record_end(last):
            await self._store.save(
                self._claimed.project,
                stored,
                conversation=conversation_for(response),
                owner=self._owner,
                events=last,
            )
        self._saved = True
        self.events.end()

    async def discard(self, run: Run) -> None:
        """Save nothing: the next process that claims the run continues it."""


class _Earlier(NamedTuple):
    """The part of a response that earlier attempts have made.

    `shown` are the deltas of the events that readers may have seen, and `finished` those of hosted steps after them.
    `filter` removes them from the deltas of this attempt, if it repeats them.
    """

    shown: list[Delta]
    finished: list[Delta]
    journal: StepJournal
    filter: ReplayFilter


@contextmanager
def _postpone_preparation() -> Iterator[None]:
    """Raise Overloaded if the budget of histories is exhausted, and StoreFailed if the store is unavailable."""
    try:
        yield
    except HistoryBudgetExhausted as error:
        raise Overloaded(error.message) from None
    except StoreUnavailable as error:
        raise StoreFailed(error.message) from error


def _can_reproduce(response: Response, mint: Mint, logged: Sequence[Event | Unknown]) -> bool:
    """Return True if composing the replayed deltas gives the logged events.

    Decoded events are compared, because the fields of an upstream's events come in any order. An earlier version of the
    server may have logged them: fields that are null, empty or absent are equal.
    """
    composer = Composer(response, new_id=Mint(mint.token, mint.minted).new_id, now=int)
    try:
        again = (*composer.start(), *composer.compose(decompose_events(logged)))
        return [_simplify_event(event) for event in again] == [_simplify_event(event) for event in logged]
    except Exception:  # another attempt would fail in the same way
        logger.exception("the events of a response cannot be reproduced", extra={"response_id": response.id})
        return False


def _simplify_event(event: Event | Unknown) -> Any:
    fields = msgspec.json.decode(encode_json_line(event))
    if event.type == "response.function_call_arguments.done":
        fields.pop("name", None)  # version 0.1.0 did not write it
    return _remove_empty(fields)


def _remove_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _remove_empty(inner) for name, inner in value.items() if inner is not None and inner != []}
    return [_remove_empty(each) for each in value] if isinstance(value, list) else value
