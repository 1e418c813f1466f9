"""The OpenAPI document of a server with default settings. Making it takes a fifth of a second."""

import functools
from typing import Any

from antiphon.engine.assembly import make_containers
from antiphon.engine.engine import Engine
from antiphon.server.openapi import make_openapi_document
from antiphon.server.router import Router
from antiphon.server.routes import make_router
from antiphon.store.memory.store import MemoryStore
from support.live_server import make_settings


def make_test_router(**changes: Any) -> Router:
    settings = make_settings(**changes)
    store = MemoryStore()
    return make_router(Engine(backends={}, store=store, containers=make_containers(settings, store)), settings)


@functools.cache
def load_document(*, requires_key: bool) -> dict[str, Any]:
    """Return the document. Callers share it and do not change it."""
    return make_openapi_document(make_test_router(), requires_key=requires_key)
