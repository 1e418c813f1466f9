"""Responses in memory."""

from collections.abc import Sequence

from antiphon.errors import NotFound
from antiphon.store.base import LeaseLost, Link, StoredResponse
from antiphon.store.memory.conversations import Conversations
from antiphon.store.memory.events import EventLog
from antiphon.store.memory.references import References
from antiphon.store.memory.tables import Key
from antiphon.store.record import Batch, Record, find_foreign, pack, pack_events, pack_items, unpack, walk


class Responses(Conversations, References, EventLog):
    async def save(
        self,
        project: str,
        stored: StoredResponse,
        *,
        conversation: str | None = None,
        owner: str | None = None,
        events: tuple[int, Sequence[bytes]] | None = None,
    ) -> None:
        record = pack(stored)
        foreign = find_foreign(stored)
        batch = None if events is None else pack_events(*events)
        key = project, record.id
        if owner is not None and not self._holds(key, owner):
            raise LeaseLost(f"The run of {record.id} is not, or no longer, {owner}'s.")
        earlier = self._tables.responses.get(key)
        if earlier is not None and earlier.final and not record.final:
            return
        if batch is not None:
            self._check_number(key, batch)
        if conversation is not None:
            row = self._find_conversation(project, conversation)
            if row is None:
                raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")
            self._append_block(row, record.id, pack_items(stored.input), pack_items(stored.response.output))
            self._prolong(row, stored.expires_at)
        self._keep(key, record, batch)
        self._note_items(key, foreign)

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        record = self._find_response(project, response_id)
        if record is None:
            return None
        return unpack(record.id, record.expires_at, record.input, record.output, record.body)

    async def delete(self, project: str, response_id: str) -> bool:
        if self._find_response(project, response_id) is None:
            return False
        self._forget((project, response_id))
        return True

    async def chain(self, project: str, response_id: str) -> list[Link]:
        if self._find_response(project, response_id) is None:
            return []
        return walk(response_id, lambda wanted: self._tables.responses.get((project, wanted)))

    async def expire(self, now: int) -> int:
        tables = self._tables
        responses = _find_expired(tables.responses, now)
        for key in responses:
            self._forget(key)
        conversations = [key for key, row in tables.conversations.items() if _has_expired(row.expires_at, now)]
        for key in conversations:
            del tables.conversations[key]
        return len(responses) + len(conversations)

    def _find_response(self, project: str, response_id: str) -> Record | None:
        record = self._tables.responses.get((project, response_id))
        return record if record is not None and self._is_live(record) else None

    def _keep(self, key: Key, record: Record, batch: Batch | None) -> None:
        self._tables.responses[key] = record
        if record.final:
            self._tables.runs.pop(key, None)
        if batch is not None:
            self._tables.events.setdefault(key, []).append(batch)

    def _forget(self, key: Key) -> None:
        del self._tables.responses[key]
        self._tables.foreign.pop(key, None)
        self._tables.runs.pop(key, None)
        self._tables.events.pop(key, None)


def _find_expired(responses: dict[Key, Record], now: int) -> list[Key]:
    """Those that have expired and that nothing newer continues but what goes, too."""
    expired = []
    continued: set[Key] = set()
    for key, record in reversed(responses.items()):  # newest first, so that each is looked at once
        if _has_expired(record.expires_at, now) and key not in continued:
            expired.append(key)
        elif record.previous_response_id is not None:
            continued.add((key[0], record.previous_response_id))
    return expired


def _has_expired(expires_at: int | None, now: int) -> bool:
    return expires_at is not None and expires_at <= now
