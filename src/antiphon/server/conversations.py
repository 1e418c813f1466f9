"""The handlers of /v1/conversations."""

from typing import Literal

from msgspec import Struct

from antiphon.engine.engine import Engine
from antiphon.protocol import codec
from antiphon.server.http import Exchange, read_body
from antiphon.server.query import ItemQuery, PageQuery, read_query


class DeletedConversation(Struct):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ConversationHandlers:
    """One method for each operation on conversations and their items."""

    def __init__(self, engine: Engine, *, max_body_bytes: int) -> None:
        self._conversations = engine.conversations
        self._reasoning = engine.reasoning
        self._max_body_bytes = max_body_bytes

    async def create(self, exchange: Exchange) -> None:
        asked, ignored = codec.decode_create_conversation(await read_body(exchange, self._max_body_bytes))
        exchange.note_ignored(ignored)
        await exchange.answer_with(
            await self._conversations.create(exchange.project, asked.items or (), asked.metadata)
        )

    async def retrieve(self, exchange: Exchange) -> None:
        await exchange.answer_with(await self._conversations.retrieve(exchange.project, exchange.param))

    async def update(self, exchange: Exchange) -> None:
        asked, ignored = codec.decode_update_conversation(await read_body(exchange, self._max_body_bytes))
        exchange.note_ignored(ignored)
        await exchange.answer_with(await self._conversations.update(exchange.project, exchange.param, asked.metadata))

    async def delete(self, exchange: Exchange) -> None:
        await self._conversations.delete(exchange.project, exchange.param)
        await exchange.answer_with(DeletedConversation(exchange.param))

    async def add_items(self, exchange: Exchange) -> None:
        query = read_query(exchange, ItemQuery)
        asked, ignored = codec.decode_add_items(await read_body(exchange, self._max_body_bytes))
        exchange.note_ignored(ignored)
        page = await self._conversations.add_items(exchange.project, exchange.param, asked.items)
        if query.wants_seals:
            page = self._reasoning.seal_page(page, project=exchange.project)
        await exchange.answer_with(page)

    async def list_items(self, exchange: Exchange) -> None:
        query = read_query(exchange, PageQuery)
        page = await self._conversations.list_items(
            exchange.project, exchange.param, after=query.after, limit=query.limit, order=query.order
        )
        if query.wants_seals:
            page = self._reasoning.seal_page(page, project=exchange.project)
        await exchange.answer_with(page)

    async def retrieve_item(self, exchange: Exchange) -> None:
        query = read_query(exchange, ItemQuery)
        item = await self._conversations.retrieve_item(exchange.project, *exchange.params)
        if query.wants_seals:
            item = self._reasoning.seal_item(item, project=exchange.project)
        await exchange.answer_with(item)

    async def delete_item(self, exchange: Exchange) -> None:
        conversation_id, item_id = exchange.params
        await exchange.answer_with(await self._conversations.delete_item(exchange.project, conversation_id, item_id))
