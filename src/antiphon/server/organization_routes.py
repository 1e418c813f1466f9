"""The routes of /v1/organization. The first request loads their handlers."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from antiphon.config import Settings
from antiphon.engine.engine import Engine
from antiphon.server.http import HttpRequest
from antiphon.server.router import Handler, Operation, Router

_PACKAGE = "antiphon.server.organization"
_PROJECTS = "/v1/organization/projects"
_PROJECT = f"{_PROJECTS}/{{project_id}}"
_KEYS = f"{_PROJECT}/api_keys"
# The method, the path, the module and the name of the handler.
_ROUTES = (
    ("GET", _PROJECTS, "projects", "list_all"),
    ("POST", _PROJECTS, "projects", "create"),
    ("GET", _PROJECT, "projects", "retrieve"),
    ("POST", _PROJECT, "projects", "update"),
    ("POST", f"{_PROJECT}/archive", "projects", "archive"),
    ("GET", _KEYS, "projects", "list_keys"),
    ("POST", _KEYS, "projects", "create_key"),
    ("GET", f"{_KEYS}/{{api_key_id}}", "projects", "retrieve_key"),
    ("DELETE", f"{_KEYS}/{{api_key_id}}", "projects", "delete_key"),
    ("GET", "/v1/organization/usage/completions", "usage", "list_usage"),
    ("GET", "/v1/organization/costs", "usage", "list_costs"),
)
_CLASSES = {"projects": "ProjectHandlers", "usage": "UsageHandlers"}
_WITH_QUERY = frozenset({"list_all", "list_keys", "list_usage", "list_costs"})


def add_organization_routes(router: Router, engine: Engine, get_settings: Callable[[], Settings]) -> None:
    """Add all routes of this module. `get_settings` returns the settings of the server, which a reload can change."""

    @functools.cache
    def load(module: str) -> Any:
        source = engine if module == "usage" else engine.admin_store
        return _find_class(module)(source, get_settings)

    def bind(module: str, name: str) -> Handler:
        async def handle(http_request: HttpRequest) -> None:
            await getattr(load(module), name)(http_request)

        return handle

    for method, path, module, name in _ROUTES:
        operation = functools.partial(_find_operation, module, name)
        router.add(method, path, bind(module, name), operation, reads_query=name in _WITH_QUERY)


def _find_class(module: str) -> Any:
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), _CLASSES[module])


def _find_operation(module: str, name: str) -> Operation:
    found: Operation = _find_class(module).operations[name]
    return found
