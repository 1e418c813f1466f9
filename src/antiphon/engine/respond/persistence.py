"""Persistence of foreground responses, and deletion of expired ones.

Errors of the store, such as a full disk, are raised. `Run._save` turns them into a failed response.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from antiphon import offload
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.prepare import Prepared
from antiphon.engine.respond.run import ResponseSink, Run
from antiphon.engine.respond.session import ConnectionMemory
from antiphon.errors import NotFound, StoreUnavailable
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ResponseStore, Store, StoredResponse

logger = logging.getLogger(__name__)

# Interval of the deletion, and the time for which expired rows are only hidden.
EXPIRY_INTERVAL_SECONDS = 3600.0


class StoreSink:
    """Saves a foreground response in the store, and in its conversation."""

    def __init__(self, store: Store, policy: Policy, *, project: str, input_items: list[Item | Unknown]) -> None:
        self._store = store
        self._policy = policy
        self._project = project
        self._input_items = input_items

    async def save(self, response: Response, last_events: Sequence[Event | Unknown]) -> None:
        conversation = conversation_for(response)
        expires_at = compute_expiry(self._policy)
        if response.store:
            stored = StoredResponse(response=response, input=self._input_items, expires_at=expires_at)
            await self._store.save(self._project, stored, conversation=conversation)
        elif conversation is not None:
            appended = await self._store.append_items(
                self._project, conversation, self._input_items, answer=response.output, expires_at=expires_at
            )
            if not appended:
                raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")

    async def discard(self, run: Run) -> None:
        """Save the output so far as a cancelled response: the client has disconnected."""
        try:
            await self.save(run.close_as_cancelled(), ())
        except StoreUnavailable as error:
            logger.error("the response could not be stored: %s", error.message, extra={"response_id": run.response.id})
        except Exception:
            logger.exception("the response could not be stored", extra={"response_id": run.response.id})


class SessionSink:
    """Saves a response in another sink, and then in the memory of its connection."""

    def __init__(self, sink: ResponseSink, session: ConnectionMemory, prepared: Prepared) -> None:
        self._sink = sink
        self._session = session
        self._prepared = prepared

    async def save(self, response: Response, last_events: Sequence[Event | Unknown]) -> None:
        await self._sink.save(response, last_events)
        if response.status == "failed":
            self._session.forget(response.previous_response_id)
            return
        turn = self._prepared.turn
        input_items, size = self._prepared.input, None
        if offload.is_large():
            items = self._session.list_unmeasured(response, turn.items, input_items=input_items)
            size = len(await offload.run(codec.encode, items))
        lane = turn.request.stream_id
        self._session.remember(response, turn.items, input_items=input_items, lane=lane, size=size)

    async def discard(self, run: Run) -> None:
        await self._sink.discard(run)


def conversation_for(response: Response) -> str | None:
    """Return the conversation to append a finished response to. Failed and cancelled responses are not appended."""
    if response.conversation is None or response.status not in ("completed", "incomplete"):
        return None
    return response.conversation.id


def compute_expiry(policy: Policy) -> int | None:
    """Return the time at which data stored now expires, or None."""
    return None if policy.retention_seconds is None else int(time.time()) + policy.retention_seconds


class ExpirySweeper:
    """Deletes responses and conversations that expired an hour ago, and shrinks the store: at the start and every hour.

    Until then they are only hidden, because a response in progress may still continue one of them.
    """

    def __init__(self, store: ResponseStore) -> None:
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
                deleted = await self._store.expire(int(time.time() - EXPIRY_INTERVAL_SECONDS))
                freed = await self._store.shrink()
            except StoreUnavailable as error:
                logger.error("expired responses and conversations could not be deleted: %s", error.message)
            except Exception:
                logger.exception("expired responses and conversations could not be deleted")
            else:
                if deleted:
                    logger.info("deleted %d expired responses and conversations", deleted)
                if freed:
                    logger.info("the store is %d KB smaller", freed >> 10)
            await asyncio.sleep(EXPIRY_INTERVAL_SECONDS)
