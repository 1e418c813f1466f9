"""Persistence of foreground responses.

Errors of the store, such as a full disk, are raised. `Run._save` turns them into a failed response.
"""

import logging
from collections.abc import Sequence

from antiphon import offload
from antiphon.engine.expiry import compute_expiry
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.prepare import Prepared
from antiphon.engine.respond.connection_memory import ConnectionMemory
from antiphon.engine.respond.run import ResponseSink, Run
from antiphon.errors import NotFound, StoreUnavailable
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store, StoredResponse
from antiphon.store.encoded_response import EncodedResponse

logger = logging.getLogger(__name__)


class StoreSink:
    """Saves a foreground response in the store, and in its conversation. `encoded` gets the JSON of the response."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        project: str,
        input_items: list[Item | Unknown],
        has_own_ids: bool = False,
        encoded: EncodedResponse | None = None,
    ) -> None:
        self._has_own_ids = has_own_ids
        self._encoded = encoded
        self._store = store
        self._policy = policy
        self._project = project
        self._input_items = input_items

    async def save(self, response: Response, last_events: Sequence[Event | Unknown]) -> None:
        conversation = conversation_for(response)
        expires_at = compute_expiry(self._policy)
        if response.store:
            stored = StoredResponse(
                response=response,
                input=self._input_items,
                expires_at=expires_at,
                has_own_ids=self._has_own_ids,
                encoded=self._encoded,
            )
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


class ConnectionSink:
    """Saves a response in another sink, and then in the memory of its connection."""

    def __init__(self, sink: ResponseSink, memory: ConnectionMemory, prepared: Prepared) -> None:
        self._sink = sink
        self._memory = memory
        self._prepared = prepared

    async def save(self, response: Response, last_events: Sequence[Event | Unknown]) -> None:
        await self._sink.save(response, last_events)
        if response.status == "failed":
            self._memory.forget(response.previous_response_id)
            return
        turn = self._prepared.turn
        input_items, size = self._prepared.input, None
        if offload.is_large():
            items = self._memory.list_unmeasured(response, turn.items, input_items=input_items)
            size = len(await offload.run(codec.encode, items))
        lane = turn.request.stream_id
        self._memory.remember(response, turn.items, input_items=input_items, lane=lane, size=size)

    async def discard(self, run: Run) -> None:
        await self._sink.discard(run)


def conversation_for(response: Response) -> str | None:
    """Return the conversation to append a finished response to. Failed and cancelled responses are not appended."""
    if response.conversation is None or response.status not in ("completed", "incomplete"):
        return None
    return response.conversation.id
