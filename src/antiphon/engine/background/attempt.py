"""One attempt at a background response: the first, or one that goes on where a dead process left off.

What a reader was shown stays true. If nobody has watched, the response simply begins again. If somebody has, the second
run must repeat what the first one said and go on from there; where it says something else, the response fails and says
why. There are never two versions of an event under one number.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple

import msgspec

from antiphon.backends.base import Turn
from antiphon.engine.background.event_writer import Journal, Log, end_log, read_log
from antiphon.engine.prepare.prepare import Resolved
from antiphon.engine.respond.ids import Mint
from antiphon.engine.respond.persistence import conversation_for
from antiphon.engine.respond.run import Postponed, Run
from antiphon.engine.serve.routing import Serving, Standing
from antiphon.errors import ModelNotFound, ServerError
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.items import Item
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ClaimedRun, LeaseLost, RunKey, Store, StoredResponse
from antiphon.stream.composer import Composer
from antiphon.stream.decompose import decompose_events
from antiphon.stream.deltas import Delta, Deltas, Failure, Finish
from antiphon.stream.replay import Diverged, ReplayFilter
from antiphon.stream.sse import encode_json_line

logger = logging.getLogger(__name__)

# A response that brings down its process each time must not do so for ever.
MOST_INTERRUPTIONS = 3
# For so long a finished response waits for a store that fails, and asks it so often.
KEEPING_SECONDS = 600.0
RETRY_SECONDS = 1.0
# For so many leases a response of others is left to them, by what its model is here.
LEASES_FOR_OTHERS: Mapping[Standing, int] = {"listed": 0, "passed on": 1, "unknown": 4}
# What is left of a response that cannot be read is kept for so long: nobody knows how long it was meant to be.
REMAINS_SECONDS = 24 * 3600

DIVERGED = Failure("The server was interrupted, and the model did not repeat what it had said.", "interrupted")
DAMAGED = Failure("The server was interrupted, and what the model had said cannot be read any more.", "interrupted")
GIVEN_UP = Failure(
    f"The server was interrupted {MOST_INTERRUPTIONS} times while working on this response.", "interrupted"
)


class LeftToOthers(Postponed):
    """Another process may have the model: the run is left to others until it has been free for so long."""

    def __init__(self, patience: float) -> None:
        super().__init__(f"left to other processes for {patience} seconds")
        self.patience = patience


class QueuedRequest(msgspec.Struct, kw_only=True):
    """What a run needs to begin, in any process: the request, and how many ids its input took."""

    request: CreateRequest
    minted: int


class Ways(NamedTuple):
    """What an engine does for a run: say what its model is here, lay out the turn from the stored request, begin it."""

    classify: Callable[[str], Standing]
    make_turn: Callable[[QueuedRequest, Sequence[Item | Unknown], RunKey], Awaitable[Turn]]
    start_turn: Callable[[Turn, RunKey, Sequence[Delta]], Awaitable[Serving]]


class Attempt:
    """Works on a claimed run. `lease` is the measure of how long others have to take it if we do not have its model."""

    def __init__(self, claimed: ClaimedRun, owner: str, store: Store, ways: Ways, *, lease: float) -> None:
        self._claimed = claimed
        self._owner = owner
        self._store = store
        self._ways = ways
        self._lease = lease
        self._asked: StoredResponse | None = None
        self._run: Run | None = None
        self._cancelled = claimed.cancelled
        self._kept = False
        self.journal = Journal(store, project=claimed.project, response_id=claimed.response_id, owner=owner)

    def cancel(self) -> None:
        self._cancelled = True
        if self._run is not None:
            self._run.cancel()

    async def work(self) -> None:
        """Run the response to its end.

        Raises LeaseLost when another process has taken it over, LeftToOthers when another process should.
        """
        try:
            await self._take_up()
        except (LeaseLost, LeftToOthers):
            raise
        except Exception:
            # Unless it was read, nothing may be put in its place yet: the store may only have failed for a moment.
            unwanted = self._cancelled and self._asked is not None
            if self._claimed.interruptions < MOST_INTERRUPTIONS and not unwanted:
                raise
            logger.exception("a background response was given up", extra={"response_id": self._claimed.response_id})
            await self._give_up()

    async def _take_up(self) -> None:
        asked = self._asked = await self._store.load(self._claimed.project, self._claimed.response_id)
        if asked is None:  # deleted while it waited
            return
        log = await self._settle_log()
        if log.damaged:
            await self._fail(DAMAGED, log)
            return
        self.journal.recover(log.next)
        response = self._begin_response()
        queued = msgspec.json.decode(self._claimed.request, type=QueuedRequest)
        mint = Mint(response.id.removeprefix("resp_"), queued.minted)
        if log.told and not _repeats(response, mint, log.told):
            await self._fail(DIVERGED, log)
            return
        await self._go_on(asked, response, queued, mint, log.told)

    async def _go_on(
        self,
        asked: StoredResponse,
        response: Response,
        queued: QueuedRequest,
        mint: Mint,
        told: Sequence[Event | Unknown],
    ) -> None:
        if not self._cancelled and self._claimed.interruptions < MOST_INTERRUPTIONS:  # to end it takes no model
            self._leave_to_others(self._ways.classify(queued.request.model or ""))
        await self._show_progress(response)
        turn = Turn(request=queued.request, items=[])
        resolved = Resolved(turn=turn, input=asked.input, response=response, mint=mint, warnings=[])
        deltas = self._speak(queued, asked.input, decompose_events(told))
        self._run = Run(resolved, deltas, self, told=decompose_events(told))
        async with aclosing(self._run.events()) as batches:
            async for batch in batches:
                if not self.journal.ending:
                    self.journal.write(batch)
        if not self._kept:
            raise ServerError(f"The response {response.id} could not be stored.")

    def _begin_response(self) -> Response:
        """The response as it was queued, or as much of it as is known if it cannot be read."""
        if self._asked is not None:
            return msgspec.structs.replace(self._asked.response, status="queued", output=[])
        claimed = self._claimed
        return Response(
            id=claimed.response_id, created_at=int(time.time()), status="queued", model=claimed.model, background=True
        )

    async def _settle_log(self) -> Log:
        """The events that an earlier attempt left and somebody may have seen."""
        project, response_id = self._claimed.project, self._claimed.response_id
        if self._claimed.attempt == 1 or await self._store.drop_events(project, response_id, owner=self._owner):
            return read_log([])
        return read_log(await self._store.read_events(project, response_id, -1))

    async def _show_progress(self, response: Response) -> None:
        """Whoever polls sees that the response is being worked on."""
        assert self._asked is not None
        begun = msgspec.structs.replace(response, status="in_progress")
        stored = msgspec.structs.replace(self._asked, response=begun)
        await self._store.save(self._claimed.project, stored, owner=self._owner)

    async def _speak(self, queued: QueuedRequest, asked: Sequence[Item | Unknown], told: list[Delta]) -> Deltas:
        if self._cancelled:
            yield [Finish("cancelled")]
            return
        if self._claimed.interruptions >= MOST_INTERRUPTIONS:
            yield [GIVEN_UP]
            return
        key = RunKey(self._claimed.project, self._claimed.response_id)
        turn = await self._ways.make_turn(queued, asked, key)
        retelling = ReplayFilter(told)
        try:
            serving = await self._ways.start_turn(turn, key, told)
        except ModelNotFound:  # an upstream may have another word on what it has
            self._leave_to_others("unknown")
            raise
        yield [serving.told]
        async with aclosing(serving.deltas) as deltas:
            async for batch in deltas:
                try:
                    yield retelling.feed(batch)
                except Diverged:
                    yield [DIVERGED]
                    return

    def _leave_to_others(self, standing: Standing) -> None:
        """Raises LeftToOthers while they have time to take it. What was asked for here is ours; an old run names no
        model."""
        claimed = self._claimed
        patience = LEASES_FOR_OTHERS[standing] * self._lease
        if claimed.ours or not claimed.model or not patience:
            return
        if time.time() - claimed.free_since < patience:
            raise LeftToOthers(patience)

    async def _give_up(self) -> None:
        """End it though something is amiss. If even its log cannot be read, it ends without telling so there."""
        log = None
        with suppress(ServerError):
            await self.journal.prepare_end(())  # nothing of ours is on its way to the log any more
            log = read_log(await self._store.read_events(self._claimed.project, self._claimed.response_id, -1))
        await self._fail(GIVEN_UP, log)

    async def _fail(self, reason: Failure, log: Log | None) -> None:
        """The log cannot be gone on with, not even to close what is open in it."""
        ended, last = end_log(self._begin_response(), log or read_log([]), None if self._cancelled else reason)
        await self._keep(ended, None if log is None else (log.next, [encode_json_line(event) for event in last]))

    # What the run does with its outcome

    async def finish(self, response: Response, last: Sequence[Event | Unknown]) -> None:
        """Keep the final response together with its last events: what a model has said once is worth waiting for."""
        final = await self.journal.prepare_end(last)
        deadline = time.monotonic() + KEEPING_SECONDS
        failures = 0
        while not self._kept:
            try:
                await self._keep(response, final)
            except ServerError as error:
                if time.monotonic() > deadline:
                    raise Postponed("The store failed for too long.") from error
                if failures == 0:
                    logger.exception("the response cannot be stored yet", extra={"response_id": response.id})
                failures += 1
                await asyncio.sleep(RETRY_SECONDS)

    async def _keep(self, response: Response, last: tuple[int, list[bytes]] | None) -> None:
        if self._asked is not None:
            stored = msgspec.structs.replace(self._asked, response=response)
        else:
            stored = StoredResponse(response=response, input=[], expires_at=int(time.time()) + REMAINS_SECONDS)
        await self._store.save(
            self._claimed.project,
            stored,
            conversation=conversation_for(response),
            owner=self._owner,
            events=last,
        )
        self._kept = True
        self.journal.end()

    async def abandon(self, run: Run) -> None:
        """Nothing of a broken-off attempt is final: whoever claims the run next goes on with it."""


def _repeats(response: Response, mint: Mint, told: Sequence[Event | Unknown]) -> bool:
    """Whether composing the recalled deltas again tells the very events of the log.

    They are compared as they are read: the fields of another server's events come in an order of its own.
    """
    composer = Composer(response, new_id=Mint(mint.token, mint.minted), now=int)
    try:
        again = (encode_json_line(event) for event in (*composer.start(), *composer.compose(decompose_events(told))))
        return [codec.decode_event(line) for line in again] == list(told)
    except Exception:  # no other attempt would fare better
        logger.exception("the events of a response cannot be read again", extra={"response_id": response.id})
        return False
