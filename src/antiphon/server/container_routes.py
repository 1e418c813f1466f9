"""The routes of /v1/containers. The first request loads their handlers."""

import functools
from typing import Any

from antiphon.config import Settings
from antiphon.engine.containers.containers import Containers
from antiphon.server.http import HttpRequest
from antiphon.server.router import Handler, Operation, Router

_CONTAINER = "/v1/containers/{container_id}"
_FILE = f"{_CONTAINER}/files/{{file_id}}"
# The method, the path, and the name of the handler.
_ROUTES = (
    ("POST", "/v1/containers", "create"),
    ("GET", "/v1/containers", "list_all"),
    ("GET", _CONTAINER, "retrieve"),
    ("DELETE", _CONTAINER, "delete"),
    ("POST", f"{_CONTAINER}/files", "add_file"),
    ("GET", f"{_CONTAINER}/files", "list_files"),
    ("GET", _FILE, "retrieve_file"),
    ("GET", f"{_FILE}/content", "download"),
    ("DELETE", _FILE, "delete_file"),
)
_WITH_QUERY = frozenset({"list_all", "list_files"})


def add_container_routes(router: Router, containers: Containers, settings: Settings) -> None:
    @functools.cache
    def load() -> Any:
        from antiphon.server.containers import ContainerHandlers

        return ContainerHandlers(containers, settings)

    def bind(name: str) -> Handler:
        async def handle(http_request: HttpRequest) -> None:
            await getattr(load(), name)(http_request)

        return handle

    for method, path, name in _ROUTES:
        operation = functools.partial(_find_operation, name)
        router.add(method, path, bind(name), operation, reads_query=name in _WITH_QUERY)


def _find_operation(name: str) -> Operation:
    from antiphon.server.containers import ContainerHandlers

    found: Operation = ContainerHandlers.operations[name]
    return found
