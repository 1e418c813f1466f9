"""The handlers of /v1/conversations."""

from typing import ClassVar, Literal

from msgspec import Struct

from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.engine.items import ItemPage
from antiphon.errors import NotFound
from antiphon.protocol import codec
from antiphon.protocol.conversation import AddItems, Conversation, CreateConversation, UpdateConversation
from antiphon.protocol.events import OneItem
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.server.http import HttpRequest
from antiphon.server.include import IncludeFilter
from antiphon.server.query import ItemQuery, PageQuery, read_query
from antiphon.server.request_body import read_json_body
from antiphon.server.router import Operation


class DeletedConversation(Struct):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ConversationHandlers:
    """One method per operation on conversations and their items."""

    operations: ClassVar[dict[str, Operation]] = {
        "create": Operation(
            id="createConversation",
            summary="Create a conversation.",
            body_type=CreateConversation,
            optional_body=True,
            response_type=Conversation,
            errors=(NotFound,),
        ),
        "retrieve": Operation(id="getConversation", summary="Get a conversation.", response_type=Conversation),
        "update": Operation(
            id="updateConversation",
            summary="Replace a conversation's metadata.",
            body_type=UpdateConversation,
            response_type=Conversation,
        ),
        "delete": Operation(
            id="deleteConversation", summary="Delete a conversation.", response_type=DeletedConversation
        ),
        "add_items": Operation(
            id="addItems",
            summary="Add items to a conversation.",
            body_type=AddItems,
            query_type=ItemQuery,
            response_type=ItemPage,
        ),
        "list_items": Operation(
            id="listItems", summary="List a conversation's items.", query_type=PageQuery, response_type=ItemPage
        ),
        "retrieve_item": Operation(
            id="getItem", summary="Get an item of a conversation.", query_type=ItemQuery, response_type=OneItem
        ),
        "delete_item": Operation(
            id="deleteItem", summary="Delete an item of a conversation.", response_type=Conversation
        ),
    }

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._conversations = engine.conversations
        self._reasoning = engine.reasoning
        self._settings = settings

    async def create(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, codec.decode_create_conversation, self._settings)
        await http_request.respond_with(
            await self._conversations.create(http_request.project, body.items or (), body.metadata)
        )

    async def retrieve(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(
            await self._conversations.retrieve(http_request.project, http_request.path_param)
        )

    async def update(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, codec.decode_update_conversation, self._settings)
        await http_request.respond_with(
            await self._conversations.update(http_request.project, http_request.path_param, body.metadata)
        )

    async def delete(self, http_request: HttpRequest) -> None:
        await self._conversations.delete(http_request.project, http_request.path_param)
        await http_request.respond_with(DeletedConversation(http_request.path_param))

    async def add_items(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, ItemQuery)
        body = await read_json_body(http_request, codec.decode_add_items, self._settings)
        page = await self._conversations.add_items(http_request.project, http_request.path_param, body.items)
        await http_request.respond_with(self._adapt_page(page, http_request.project, query))

    async def list_items(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(await self._load_page(http_request, read_query(http_request, PageQuery)))

    async def _load_page(self, http_request: HttpRequest, query: PageQuery) -> ItemPage:
        page = await self._conversations.list_items(
            http_request.project, http_request.path_param, after=query.after, limit=query.limit, order=query.order
        )
        return self._adapt_page(page, http_request.project, query)

    async def retrieve_item(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(await self._load_item(http_request, read_query(http_request, ItemQuery)))

    async def _load_item(self, http_request: HttpRequest, query: ItemQuery) -> Item | Unknown:
        item = await self._conversations.retrieve_item(http_request.project, *http_request.path_params)
        if query.wants_seals:
            item = self._reasoning.seal_item(item, project=http_request.project)
        return IncludeFilter(query.include).filter_item(item)

    def _adapt_page(self, page: ItemPage, project: str, query: ItemQuery) -> ItemPage:
        if query.wants_seals:
            page = self._reasoning.seal_page(page, project=project)
        return IncludeFilter(query.include).filter_page(page)

    async def delete_item(self, http_request: HttpRequest) -> None:
        conversation_id, item_id = http_request.path_params
        await http_request.respond_with(
            await self._conversations.delete_item(http_request.project, conversation_id, item_id)
        )
