"""Keeping foreground responses: in the store, and in the conversation they belong to."""

import asyncio
import logging
import time
from collections.abc import Sequence

from antiphon.engine.policy import Policy
from antiphon.engine.prepare.prepare import Resolved
from antiphon.engine.respond.run import Keeper, Run
from antiphon.engine.respond.session import Session
from antiphon.errors import NotFound
from antiphon.protocol.events import Event
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Responses, Store, StoredResponse

logger = logging.getLogger(__name__)


class ForegroundKeeper:
    """Keeps a response whose client waits for it."""

    def __init__(self, store: Store, policy: Policy, *, project: str, asked: list[Item | Unknown]) -> None:
        self._store = store
        self._policy = policy
        self._project = project
        self._asked = asked

    async def finish(self, response: Response, last: Sequence[Event | Unknown]) -> None:
        conversation = conversation_for(response)
        if response.store:
            stored = StoredResponse(response=response, input=self._asked, expires_at=expiry(self._policy))
            await self._store.save(self._project, stored, conversation=conversation)
        elif conversation is not None:
            appended = await self._store.append_items(
                self._project, conversation, self._asked, answer=response.output, expires_at=expiry(self._policy)
            )
            if not appended:
                raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")

    async def abandon(self, run: Run) -> None:
        """The client went away: what the model said until then is kept as a cancelled response."""
        try:
            await self.finish(run.close_as_cancelled(), ())
        except Exception:
            logger.exception("the response could not be stored", extra={"response_id": run.response.id})


class SessionKeeper:
    """Keeps a response of a connection in that connection's memory, too, after it was kept where it has to be."""

    def __init__(self, keeper: Keeper, session: Session, resolved: Resolved) -> None:
        self._keeper = keeper
        self._session = session
        self._resolved = resolved

    async def finish(self, response: Response, last: Sequence[Event | Unknown]) -> None:
        await self._keeper.finish(response, last)
        turn = self._resolved.turn
        if response.status == "failed":
            self._session.forget(response.previous_response_id)
        else:
            asked = self._resolved.input
            self._session.remember(response, turn.items, asked=asked, lane=turn.request.stream_id)

    async def abandon(self, run: Run) -> None:
        await self._keeper.abandon(run)


def conversation_for(response: Response) -> str | None:
    """The conversation a finished response goes into. What failed or was cancelled is no part of it."""
    if response.conversation is None or response.status not in ("completed", "incomplete"):
        return None
    return response.conversation.id


def expiry(policy: Policy) -> int | None:
    """When what is stored now expires."""
    return None if policy.retention_seconds is None else int(time.time()) + policy.retention_seconds


SWEEP_SECONDS = 3600.0


class Retention:
    """Deletes what has expired an hour ago: at the start, and then every hour. Until then it is only hidden.

    A response that has not ended yet is not in the store, and would find what it continues gone.
    """

    def __init__(self, store: Responses) -> None:
        self._store = store
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._sweep_regularly())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                forgotten = await self._store.expire(int(time.time() - SWEEP_SECONDS))
            except Exception:
                logger.exception("what has expired could not be deleted")
            else:
                if forgotten:
                    logger.info("deleted %d expired responses and conversations", forgotten)
            await asyncio.sleep(SWEEP_SECONDS)
