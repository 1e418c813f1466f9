"""The table of everything the server answers to."""

from antiphon.config import Settings
from antiphon.engine.engine import Engine
from antiphon.server.conversations import ConversationHandlers
from antiphon.server.health import HealthHandlers
from antiphon.server.keepalive import Keepalive
from antiphon.server.models import ModelHandlers
from antiphon.server.responses import ResponseHandlers
from antiphon.server.router import Router


def make_router(engine: Engine, settings: Settings) -> Router:
    router = Router()
    keepalive = Keepalive(settings.keepalive_seconds)
    _add_responses(router, ResponseHandlers(engine, max_body_bytes=settings.max_body_bytes, keepalive=keepalive))
    if not settings.stateless:
        _add_conversations(router, ConversationHandlers(engine, max_body_bytes=settings.max_body_bytes))
    models = ModelHandlers(engine)
    router.add("GET", "/v1/models", models.list_all)
    router.add("GET", "/v1/models/{id...}", models.retrieve)
    health = HealthHandlers(engine)
    router.add("GET", "/", health.greet, public=True)
    router.add("GET", "/healthz", health.live, public=True)
    router.add("GET", "/readyz", health.ready, public=True)
    return router


def _add_responses(router: Router, responses: ResponseHandlers) -> None:
    router.add("POST", "/v1/responses", responses.create)
    router.add("POST", "/v1/responses/input_tokens", responses.count_input_tokens)
    router.add("GET", "/v1/responses/{id}", responses.retrieve)
    router.add("DELETE", "/v1/responses/{id}", responses.delete)
    router.add("POST", "/v1/responses/{id}/cancel", responses.cancel)
    router.add("GET", "/v1/responses/{id}/input_items", responses.list_input_items)


def _add_conversations(router: Router, conversations: ConversationHandlers) -> None:
    router.add("POST", "/v1/conversations", conversations.create)
    router.add("GET", "/v1/conversations/{id}", conversations.retrieve)
    router.add("POST", "/v1/conversations/{id}", conversations.update)
    router.add("DELETE", "/v1/conversations/{id}", conversations.delete)
    router.add("POST", "/v1/conversations/{id}/items", conversations.add_items)
    router.add("GET", "/v1/conversations/{id}/items", conversations.list_items)
    router.add("GET", "/v1/conversations/{id}/items/{item_id}", conversations.retrieve_item)
    router.add("DELETE", "/v1/conversations/{id}/items/{item_id}", conversations.delete_item)
