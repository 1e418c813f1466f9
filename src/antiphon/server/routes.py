"""The table of all routes, with the operations that the OpenAPI document describes."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from antiphon.config import Settings
from antiphon.engine.engine import Engine
from antiphon.engine.items import ItemPage
from antiphon.errors import (
    InvalidRequest,
    NotFound,
    RateLimited,
    Unavailable,
    UpgradeRequired,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.protocol.conversation import AddItems, Conversation, CreateConversation, UpdateConversation
from antiphon.protocol.events import OneItem
from antiphon.protocol.prompt import Prompt, PromptDefinition
from antiphon.protocol.request import CompactRequest, CountRequest, CreateRequest
from antiphon.protocol.response import CompactedResponse, Response
from antiphon.server.container_routes import add_container_routes
from antiphon.server.conversations import ConversationHandlers, DeletedConversation
from antiphon.server.file_routes import add_file_routes
from antiphon.server.health import Greeting, Health, HealthHandlers
from antiphon.server.http import HttpRequest
from antiphon.server.keepalive import Keepalive
from antiphon.server.models import ModelHandlers, ModelList, ModelObject
from antiphon.server.organization_routes import add_organization_routes
from antiphon.server.prompts import DeletedPrompt, PromptHandlers, PromptList
from antiphon.server.query import ItemQuery, PageQuery, ResponseQuery, VersionQuery
from antiphon.server.responses import DeletedResponse, InputTokens, ResponseHandlers
from antiphon.server.router import Handler, Operation, Router
from antiphon.server.websocket.handler import require_upgrade

if TYPE_CHECKING:
    from antiphon.server.metrics.server_metrics import ServerMetrics


def make_router(
    engine: Engine,
    settings: Settings,
    metrics: "ServerMetrics | None" = None,
    *,
    requires_key: Callable[[], bool] | None = None,
    get_settings: Callable[[], Settings] | None = None,
) -> Router:
    """Return the router of a server. `requires_key` returns True if the server requires a key now.

    `get_settings` returns the settings after a reload.
    """
    router = Router(note=" This server keeps no state between requests." if settings.stateless else "")
    keepalive = Keepalive(settings.keepalive_seconds)
    responses = ResponseHandlers(
        engine,
        max_body_bytes=settings.max_body_bytes,
        max_body_values=settings.max_body_values,
        keepalive=keepalive,
        compat=settings.compat,
        metrics=metrics,
        stateless=settings.stateless,
    )
    _add_responses(router, responses)
    _add_websocket(router)
    if not settings.stateless:
        limits = {"max_body_bytes": settings.max_body_bytes, "max_body_values": settings.max_body_values}
        conversations = ConversationHandlers(engine, **limits)
        _add_conversations(router, conversations)
        _add_conversation_items(router, conversations)
        _add_prompts(router, PromptHandlers(engine, **limits))
        _add_agent(router, engine, settings, keepalive)
        add_file_routes(router, engine, settings)
        if engine.containers is not None:
            add_container_routes(router, engine.containers, settings)
        add_organization_routes(router, engine, get_settings or (lambda: settings))
    _add_models(router, ModelHandlers(engine))
    _add_health(router, HealthHandlers(engine))
    if metrics is not None:
        _add_metrics(router, metrics, key=settings.metrics_key)
    _add_document(router, requires_key=requires_key or (lambda: bool(settings.api_keys)))
    return router


def _load_at_first_use(load: Callable[[], Handler]) -> Handler:
    """Return a handler that its first request loads, because most servers never need its modules."""
    load = functools.cache(load)

    async def handle(http_request: HttpRequest) -> None:
        await load()(http_request)

    return handle


def _add_responses(router: Router, responses: ResponseHandlers) -> None:
    router.add(
        "POST",
        "/v1/responses",
        responses.create,
        Operation(
            id="createResponse",
            summary="Create a response.",
            body_type=CreateRequest,
            response_type=Response,
            streams=True,
            errors=(NotFound, RateLimited, UpstreamError, Unavailable, UpstreamTimeout),
        ),
    )
    router.add(
        "POST",
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        Operation(
            id="countInputTokens",
            summary="Count the input tokens of a request.",
            body_type=CountRequest,
            response_type=InputTokens,
            errors=(NotFound,),
        ),
    )
    router.add(
        "POST",
        "/v1/responses/compact",
        responses.compact,
        Operation(
            id="compactResponse",
            summary="Compact a conversation so that it fits the context window.",
            body_type=CompactRequest,
            response_type=CompactedResponse,
            errors=(NotFound,),
        ),
    )
    router.add(
        "GET",
        "/v1/responses/{response_id}",
        responses.retrieve,
        Operation(
            id="getResponse",
            summary="Get a stored response, or stream the events of a background response.",
            query_type=ResponseQuery,
            response_type=Response,
            streams=True,
        ),
    )
    router.add(
        "DELETE",
        "/v1/responses/{response_id}",
        responses.delete,
        Operation(id="deleteResponse", summary="Delete a stored response.", response_type=DeletedResponse),
    )
    router.add(
        "POST",
        "/v1/responses/{response_id}/cancel",
        responses.cancel,
        Operation(
            id="cancelResponse",
            summary="Cancel a response that is in progress.",
            response_type=Response,
            errors=(InvalidRequest,),
        ),
    )
    router.add(
        "GET",
        "/v1/responses/{response_id}/input_items",
        responses.list_input_items,
        Operation(
            id="listInputItems",
            summary="List the input items of a stored response.",
            query_type=PageQuery,
            response_type=ItemPage,
        ),
    )


def _add_websocket(router: Router) -> None:
    router.add(
        "GET",
        "/v1/responses",
        require_upgrade,
        Operation(
            id="connectResponses",
            summary="Open a WebSocket to create and steer responses.",
            errors=(UpgradeRequired, Unavailable),
        ),
    )


def _add_conversations(router: Router, conversations: ConversationHandlers) -> None:
    router.add(
        "POST",
        "/v1/conversations",
        conversations.create,
        Operation(
            id="createConversation",
            summary="Create a conversation.",
            body_type=CreateConversation,
            optional_body=True,
            response_type=Conversation,
            errors=(NotFound,),
        ),
    )
    router.add(
        "GET",
        "/v1/conversations/{conversation_id}",
        conversations.retrieve,
        Operation(id="getConversation", summary="Get a conversation.", response_type=Conversation),
    )
    router.add(
        "POST",
        "/v1/conversations/{conversation_id}",
        conversations.update,
        Operation(
            id="updateConversation",
            summary="Replace a conversation's metadata.",
            body_type=UpdateConversation,
            response_type=Conversation,
        ),
    )
    router.add(
        "DELETE",
        "/v1/conversations/{conversation_id}",
        conversations.delete,
        Operation(id="deleteConversation", summary="Delete a conversation.", response_type=DeletedConversation),
    )


def _add_conversation_items(router: Router, conversations: ConversationHandlers) -> None:
    router.add(
        "POST",
        "/v1/conversations/{conversation_id}/items",
        conversations.add_items,
        Operation(
            id="addItems",
            summary="Add items to a conversation.",
            body_type=AddItems,
            query_type=ItemQuery,
            response_type=ItemPage,
        ),
    )
    router.add(
        "GET",
        "/v1/conversations/{conversation_id}/items",
        conversations.list_items,
        Operation(id="listItems", summary="List a conversation's items.", query_type=PageQuery, response_type=ItemPage),
    )
    router.add(
        "GET",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        conversations.retrieve_item,
        Operation(id="getItem", summary="Get an item of a conversation.", query_type=ItemQuery, response_type=OneItem),
    )
    router.add(
        "DELETE",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        conversations.delete_item,
        Operation(id="deleteItem", summary="Delete an item of a conversation.", response_type=Conversation),
    )


def _add_prompts(router: Router, prompts: PromptHandlers) -> None:
    router.add(
        "POST",
        "/v1/prompts",
        prompts.define,
        Operation(
            id="definePrompt", summary="Define a version of a prompt.", body_type=PromptDefinition, response_type=Prompt
        ),
    )
    router.add(
        "GET",
        "/v1/prompts",
        prompts.list_all,
        Operation(id="listPrompts", summary="List the versions of all prompts.", response_type=PromptList),
    )
    router.add(
        "GET",
        "/v1/prompts/{prompt_id}",
        prompts.retrieve,
        Operation(
            id="getPrompt",
            summary="Get a version of a prompt, by default the newest.",
            query_type=VersionQuery,
            response_type=Prompt,
        ),
    )
    router.add(
        "DELETE",
        "/v1/prompts/{prompt_id}",
        prompts.delete,
        Operation(id="deletePrompt", summary="Delete a prompt with all its versions.", response_type=DeletedPrompt),
        reads_query=True,
    )


def _add_agent(router: Router, engine: Engine, settings: Settings, keepalive: Keepalive) -> None:
    def load() -> Handler:
        from antiphon.server.agent import AgentHandlers

        return AgentHandlers(engine, settings, keepalive=keepalive).execute

    def describe() -> Operation:
        from antiphon.agent.execute.envelope import AgentExecuteResponse
        from antiphon.agent.execute.wire import AgentExecuteBody
        from antiphon.server.agent import EVENTS

        return Operation(
            id="executeAgent",
            summary="Execute one turn of an agent with the tools of the server and the client.",
            body_type=AgentExecuteBody,
            response_type=AgentExecuteResponse,
            streams=True,
            event_types=EVENTS,
            errors=(NotFound, RateLimited, UpstreamError, Unavailable, UpstreamTimeout),
            error_type=AgentExecuteResponse,
        )

    # An error in configured tools must stop the start.
    handler = load() if settings.agent_tools else _load_at_first_use(load)
    router.add("POST", "/v1/agent/execute", handler, describe)


def _add_document(router: Router, *, requires_key: Callable[[], bool]) -> None:
    def load() -> Handler:
        from antiphon.server.openapi import OpenApiHandler

        return OpenApiHandler(router, requires_key=requires_key).show

    router.add(
        "GET",
        "/openapi.json",
        _load_at_first_use(load),
        Operation(id="getDocument", summary="Get this document.", response_type=dict[str, Any]),
        public=True,
    )


def _add_metrics(router: Router, metrics: "ServerMetrics", *, key: str) -> None:
    from antiphon.server.metrics.handler import MetricsHandler

    # With a key of its own, the handler checks it. Otherwise keys of all projects with the scope `admin` are accepted.
    router.add("GET", "/metrics", MetricsHandler(metrics, key=key).show, public=bool(key))


def _add_models(router: Router, models: ModelHandlers) -> None:
    router.add(
        "GET",
        "/v1/models",
        models.list_all,
        Operation(id="listModels", summary="List the models.", response_type=ModelList),
    )
    router.add(
        "GET",
        "/v1/models/{model...}",
        models.retrieve,
        Operation(id="getModel", summary="Get a model.", response_type=ModelObject),
    )


def _add_health(router: Router, health: HealthHandlers) -> None:
    router.add(
        "GET",
        "/",
        health.greet,
        Operation(id="greet", summary="List the main paths of the server.", response_type=Greeting),
        public=True,
    )
    router.add(
        "GET",
        "/healthz",
        health.live,
        Operation(id="checkLife", summary="Check that the process is running.", response_type=Health),
        public=True,
    )
    router.add(
        "GET",
        "/readyz",
        health.ready,
        Operation(
            id="checkReadiness",
            summary="Check that the models are loaded and the store can be written to.",
            response_type=Health,
            errors=(Unavailable,),
        ),
        public=True,
    )
