"""The handlers of /v1/conversations."""

from collections.abc import Callable
from typing import Literal, TypeVar

from msgspec import Struct

from antiphon.engine.engine import Engine
from antiphon.protocol import codec
from antiphon.server.http import HttpRequest, read_body
from antiphon.server.include import IncludeFilter
from antiphon.server.query import ItemQuery, PageQuery, read_query
from antiphon.server.request_body import decode_body

T = TypeVar("T")


class DeletedConversation(Struct):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ConversationHandlers:
    """One method per operation on conversations and their items."""

    def __init__(self, engine: Engine, *, max_body_bytes: int, max_body_values: int) -> None:
        self._conversations = engine.conversations
        self._reasoning = engine.reasoning
        self._max_body_bytes = max_body_bytes
        self._max_body_values = max_body_values

    async def _read(self, http_request: HttpRequest, decode: Callable[[bytes], T]) -> T:
        body = await read_body(http_request, self._max_body_bytes)
        return await decode_body(decode, body, max_values=self._max_body_values)

    async def create(self, http_request: HttpRequest) -> None:
        body, ignored = await self._read(http_request, codec.decode_create_conversation)
        http_request.warn_ignored(ignored)
        await http_request.respond_with(
            await self._conversations.create(http_request.project, body.items or (), body.metadata)
        )

    async def retrieve(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(
            await self._conversations.retrieve(http_request.project, http_request.path_param)
        )

    async def update(self, http_request: HttpRequest) -> None:
        body, ignored = await self._read(http_request, codec.decode_update_conversation)
        http_request.warn_ignored(ignored)
        await http_request.respond_with(
            await self._conversations.update(http_request.project, http_request.path_param, body.metadata)
        )

    async def delete(self, http_request: HttpRequest) -> None:
        await self._conversations.delete(http_request.project, http_request.path_param)
        await http_request.respond_with(DeletedConversation(http_request.path_param))

    async def add_items(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, ItemQuery)
        body, ignored = await self._read(http_request, codec.decode_add_items)
        http_request.warn_ignored(ignored)
        page = await self._conversations.add_items(http_request.project, http_request.path_param, body.items)
        if query.wants_seals:
            page = self._reasoning.seal_page(page, project=http_request.project)
        await http_request.respond_with(IncludeFilter(query.include).filter_page(page))

    async def list_items(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, PageQuery)
        page = await self._conversations.list_items(
            http_request.project, http_request.path_param, after=query.after, limit=query.limit, order=query.order
        )
        if query.wants_seals:
            page = self._reasoning.seal_page(page, project=http_request.project)
        await http_request.respond_with(IncludeFilter(query.include).filter_page(page))

    async def retrieve_item(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, ItemQuery)
        item = await self._conversations.retrieve_item(http_request.project, *http_request.path_params)
        if query.wants_seals:
            item = self._reasoning.seal_item(item, project=http_request.project)
        await http_request.respond_with(IncludeFilter(query.include).filter_item(item))

    async def delete_item(self, http_request: HttpRequest) -> None:
        conversation_id, item_id = http_request.path_params
        await http_request.respond_with(
            await self._conversations.delete_item(http_request.project, conversation_id, item_id)
        )
