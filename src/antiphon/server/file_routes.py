"""The routes of files, uploads and vector stores. The first request loads their handlers."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from antiphon.config import Settings
from antiphon.engine.engine import Engine
from antiphon.server.http import HttpRequest
from antiphon.server.router import Handler, Operation, Router

_FILES, _STORES = "antiphon.server.files", "antiphon.server.vector_stores"
_STORE = "/v1/vector_stores/{vector_store_id}"
_STORE_FILE = f"{_STORE}/files/{{file_id}}"
_BATCH = f"{_STORE}/file_batches/{{batch_id}}"

# The method, the path, and the module, class and name of the handler.
_ROUTES = (
    ("POST", "/v1/files", _FILES, "FileHandlers", "create"),
    ("GET", "/v1/files", _FILES, "FileHandlers", "list_all"),
    ("GET", "/v1/files/{file_id}", _FILES, "FileHandlers", "retrieve"),
    ("DELETE", "/v1/files/{file_id}", _FILES, "FileHandlers", "delete"),
    ("GET", "/v1/files/{file_id}/content", _FILES, "FileHandlers", "download"),
    ("POST", "/v1/uploads", _FILES, "UploadHandlers", "create"),
    ("POST", "/v1/uploads/{upload_id}/parts", _FILES, "UploadHandlers", "add_part"),
    ("POST", "/v1/uploads/{upload_id}/complete", _FILES, "UploadHandlers", "complete"),
    ("POST", "/v1/uploads/{upload_id}/cancel", _FILES, "UploadHandlers", "cancel"),
    ("POST", "/v1/vector_stores", _STORES, "VectorStoreHandlers", "create"),
    ("GET", "/v1/vector_stores", _STORES, "VectorStoreHandlers", "list_all"),
    ("GET", _STORE, _STORES, "VectorStoreHandlers", "retrieve"),
    ("POST", _STORE, _STORES, "VectorStoreHandlers", "update"),
    ("DELETE", _STORE, _STORES, "VectorStoreHandlers", "delete"),
    ("POST", f"{_STORE}/search", _STORES, "VectorStoreHandlers", "search"),
    ("POST", f"{_STORE}/files", _STORES, "VectorStoreHandlers", "attach"),
    ("GET", f"{_STORE}/files", _STORES, "VectorStoreHandlers", "list_files"),
    ("GET", _STORE_FILE, _STORES, "VectorStoreHandlers", "retrieve_file"),
    ("POST", _STORE_FILE, _STORES, "VectorStoreHandlers", "update_file"),
    ("DELETE", _STORE_FILE, _STORES, "VectorStoreHandlers", "detach"),
    ("GET", f"{_STORE_FILE}/content", _STORES, "VectorStoreHandlers", "load_content"),
    ("POST", f"{_STORE}/file_batches", _STORES, "VectorStoreHandlers", "create_batch"),
    ("GET", _BATCH, _STORES, "VectorStoreHandlers", "retrieve_batch"),
    ("POST", f"{_BATCH}/cancel", _STORES, "VectorStoreHandlers", "cancel_batch"),
    ("GET", f"{_BATCH}/files", _STORES, "VectorStoreHandlers", "list_batch_files"),
)
_WITH_QUERY = frozenset({"list_all", "list_files", "list_batch_files"})


def add_file_routes(router: Router, engine: Engine, settings: Settings) -> None:
    """Add all routes of this module."""

    @functools.cache
    def load(module: str, kind: str) -> Any:
        return getattr(importlib.import_module(module), kind)(engine.file_service, settings)

    for method, path, module, kind, name in _ROUTES:
        handler = _bind(functools.partial(load, module, kind), name)
        operation = functools.partial(_find_operation, module, kind, name)
        router.add(method, path, handler, operation, reads_query=name in _WITH_QUERY)


def _bind(load: Callable[[], Any], name: str) -> Handler:
    """Return a handler that calls this method of the loaded handlers."""

    async def handle(http_request: HttpRequest) -> None:
        await getattr(load(), name)(http_request)

    return handle


def _find_operation(module: str, kind: str, name: str) -> Operation:
    found: Operation = getattr(importlib.import_module(module), kind).operations[name]
    return found
