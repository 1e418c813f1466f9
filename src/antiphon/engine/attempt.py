"""One attempt at a background response: the first, or one that goes on where a dead process left off.

What a reader was shown stays true. If nobody has watched, the response simply begins again. If somebody has, the second
run must repeat what the first one said and go on from there; where it says something else, the response fails and says
why. There are never two versions of an event under one number.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec

from antiphon.backends.base import Deltas, Turn
from antiphon.engine.conversation import Resolved
from antiphon.engine.ids import Mint
from antiphon.engine.journal import Journal
from antiphon.engine.keeping import conversation_for
from antiphon.engine.routing import Serving
from antiphon.engine.run import Run
from antiphon.errors import ServerError
from antiphon.protocol import codec, events
from antiphon.protocol.events import Event
from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response, ResponseError
from antiphon.store.base import ClaimedRun, LeaseLost, RunKey, Store, StoredResponse
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Delta, Failure, Finish
from antiphon.stream.recollection import recall
from antiphon.stream.retelling import Diverged, Retelling
from antiphon.stream.sse import encode_line

logger = logging.getLogger(__name__)

# A response that brings down its process each time must not do so for ever.
MOST_ATTEMPTS = 3

DIVERGED = Failure("The server was interrupted, and the model did not repeat what it had said.", "interrupted")
GIVEN_UP = Failure(f"The server was interrupted {MOST_ATTEMPTS} times while working on this response.", "interrupted")


class QueuedRequest(msgspec.Struct, kw_only=True):
    """What a run needs to begin, in any process: the request, and how many ids its input took."""

    request: CreateRequest
    minted: int


MakeTurn = Callable[[QueuedRequest, Sequence[Item | Unknown], RunKey], Awaitable[Turn]]
StartTurn = Callable[[Turn, RunKey, Sequence[Delta]], Awaitable[Serving]]


def announce(response: Response) -> list[Event]:
    """The first events of a response that waits in the queue.

    They follow from the stored response alone, so that whoever tells them, before the run or in it, tells the same.
    """
    queued = msgspec.structs.replace(response, status="queued", output=[])
    return [events.Created(0, queued), events.Queued(1, queued)]


class Attempt:
    """Works on a claimed run. `make_turn` lays out the turn from the stored request, `start_turn` begins it."""

    def __init__(
        self, claimed: ClaimedRun, owner: str, store: Store, *, make_turn: MakeTurn, start_turn: StartTurn
    ) -> None:
        self._claimed = claimed
        self._owner = owner
        self._store = store
        self._make_turn = make_turn
        self._start_turn = start_turn
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
        """Run the response to its end. Raises LeaseLost when another process has taken it over."""
        asked = self._asked = await self._store.load(self._claimed.project, self._claimed.response_id)
        if asked is None:  # deleted while it waited
            return
        logged = await self._settle_log()
        self.journal.recover(len(logged))
        response = msgspec.structs.replace(asked.response, status="queued", output=[])
        told = [codec.decode_event(payload) for payload in logged]
        try:
            await self._go_on(asked, response, told, logged)
        except LeaseLost:
            raise
        except Exception:
            if self._claimed.attempt <= MOST_ATTEMPTS:
                raise
            logger.exception("a background response was given up", extra={"response_id": response.id})
            await self._fail(response, told, GIVEN_UP)

    async def _go_on(
        self, asked: StoredResponse, response: Response, told: Sequence[Event | Unknown], logged: list[bytes]
    ) -> None:
        queued = msgspec.json.decode(self._claimed.request, type=QueuedRequest)
        mint = Mint(response.id.removeprefix("resp_"), queued.minted)
        if logged and not _repeats(response, mint, recall(told), logged):
            await self._fail(response, told, DIVERGED)
            return
        await self._show_progress(response)
        turn = Turn(request=queued.request, items=[])
        resolved = Resolved(turn=turn, input=asked.input, response=response, mint=mint, warnings=[])
        deltas = self._speak(queued, asked.input, recall(told))
        self._run = Run(resolved, deltas, self, told=recall(told))
        async with aclosing(self._run.events()) as batches:
            async for batch in batches:
                if not self.journal.ending:
                    self.journal.write(batch)
        if not self._kept:
            raise ServerError(f"The response {response.id} could not be stored.")

    async def _settle_log(self) -> list[bytes]:
        """The events that an earlier attempt left and somebody may have seen."""
        project, response_id = self._claimed.project, self._claimed.response_id
        if self._claimed.attempt == 1 or await self._store.drop_events(project, response_id, owner=self._owner):
            return []
        return [payload for _, payload in await self._store.read_events(project, response_id, -1)]

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
        if self._claimed.attempt > MOST_ATTEMPTS:
            yield [GIVEN_UP]
            return
        key = RunKey(self._claimed.project, self._claimed.response_id)
        turn = await self._make_turn(queued, asked, key)
        retelling = Retelling(told)
        serving = await self._start_turn(turn, key, told)
        yield [serving.told]
        async with aclosing(serving.deltas) as deltas:
            async for batch in deltas:
                try:
                    yield retelling.feed(batch)
                except Diverged:
                    yield [DIVERGED]
                    return

    async def _fail(self, response: Response, told: Sequence[Event | Unknown], reason: Failure) -> None:
        """The log cannot be gone on with, not even to close what is open in it."""
        done = [event.item for event in told if isinstance(event, events.OutputItemDone)]
        error = ResponseError(reason.code, reason.message)
        failed = msgspec.structs.replace(response, status="failed", output=done, error=error)
        payload = events.ErrorPayload(reason.type, reason.code, reason.message, None)
        opening = [] if told else announce(response)
        number = len(told) + len(opening)
        last = [*opening, events.Error(number, payload), events.Failed(number + 1, failed)]
        await self._keep(failed, (len(told), [encode_line(event) for event in last]))

    # What the run does with its outcome

    async def finish(self, response: Response, last: Sequence[Event | Unknown]) -> None:
        """Keep the final response together with its last events."""
        await self._keep(response, await self.journal.prepare_end(last))

    async def _keep(self, response: Response, last: tuple[int, list[bytes]]) -> None:
        assert self._asked is not None
        stored = msgspec.structs.replace(self._asked, response=response)
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


def _repeats(response: Response, mint: Mint, told: list[Delta], logged: list[bytes]) -> bool:
    """Whether composing the recalled deltas again tells the very events of the log."""
    composer = Composer(response, new_id=Mint(mint.token, mint.minted), now=int)
    return [encode_line(event) for event in (*composer.start(), *composer.compose(told))] == logged
