"""The table of everything the server answers to."""

from antiphon.engine.engine import Engine
from antiphon.server.health import HealthHandlers
from antiphon.server.models import ModelHandlers
from antiphon.server.responses import ResponseHandlers
from antiphon.server.router import Router


def make_router(engine: Engine, *, max_body_bytes: int) -> Router:
    router = Router()
    responses = ResponseHandlers(engine, max_body_bytes=max_body_bytes)
    router.add("POST", "/v1/responses", responses.create)
    router.add("GET", "/v1/responses/{id}", responses.retrieve)
    router.add("DELETE", "/v1/responses/{id}", responses.delete)
    router.add("GET", "/v1/responses/{id}/input_items", responses.list_input_items)
    models = ModelHandlers(engine)
    router.add("GET", "/v1/models", models.list_all)
    router.add("GET", "/v1/models/{id...}", models.retrieve)
    health = HealthHandlers(engine)
    router.add("GET", "/", health.greet, public=True)
    router.add("GET", "/healthz", health.live, public=True)
    router.add("GET", "/readyz", health.ready, public=True)
    return router
