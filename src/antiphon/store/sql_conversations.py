"""Operations on whole conversations, shared by the SQL stores. Each has its own statements."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.record import pack_items, pack_metadata, unpack_conversation
from antiphon.store.sql_work import SqlDatabase


class ConversationWork(NamedTuple):
    """The work that `SqlConversations` submits: statements, or functions of the connection and the parameters.

    The parameters of `load` and `delete` are the project, the id and the time. `update` returns the row
    of `load`, or None.
    """

    create: Any
    load: str
    update: Any
    delete: Any
    append: Any


class SqlConversations(SqlDatabase):
    """Base of the classes that store conversations by SQL."""

    @property
    @abstractmethod
    def _work(self) -> ConversationWork: ...

    async def create_conversation(
        self,
        project: str,
        conversation: Conversation,
        items: Sequence[Item | Unknown],
        *,
        expires_at: int | None = None,
    ) -> None:
        metadata = pack_metadata(conversation.metadata)
        row = (project, conversation.id, conversation.created_at, expires_at, metadata)
        await self._writer.submit(self._work.create, (row, pack_items(items)))

    async def load_conversation(self, project: str, conversation_id: str) -> Conversation | None:
        rows = await self._reader.submit(self._work.load, (project, conversation_id, self._now()))
        return unpack_conversation(conversation_id, *rows[0]) if rows else None

    async def update_conversation(
        self, project: str, conversation_id: str, metadata: dict[str, str] | None
    ) -> Conversation | None:
        packed = pack_metadata(metadata)
        row = await self._writer.submit(self._work.update, (project, conversation_id, packed, self._now()))
        return None if row is None else unpack_conversation(conversation_id, row[0], packed)

    async def delete_conversation(self, project: str, conversation_id: str) -> bool:
        deleted: int = await self._writer.submit(self._work.delete, (project, conversation_id, self._now()))
        return deleted > 0

    async def append_items(
        self,
        project: str,
        conversation_id: str,
        items: Sequence[Item | Unknown],
        *,
        answer: Sequence[Item | Unknown] | None = None,
        expires_at: int | None = None,
    ) -> bool:
        packed = pack_items(items), None if answer is None else pack_items(answer)
        parameters = (project, conversation_id, *packed, self._now(), expires_at)
        appended: bool = await self._writer.submit(self._work.append, parameters)
        return appended
