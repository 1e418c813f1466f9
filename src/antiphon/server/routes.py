"""The table of all routes, with the scope that each of them needs."""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.errors import Unavailable, UpgradeRequired
from antiphon.server.conversations import ConversationHandlers
from antiphon.server.health import HealthHandlers
from antiphon.server.http import HttpRequest
from antiphon.server.keepalive import Keepalive
from antiphon.server.models import ModelHandlers
from antiphon.server.prompts import PromptHandlers
from antiphon.server.responses import ResponseHandlers
from antiphon.server.router import Handler, Operation, Router
from antiphon.server.scopes import ADMIN, INFERENCE, READ, Scope
from antiphon.server.websocket.handler import require_upgrade

if TYPE_CHECKING:
    from antiphon.server.metrics.server_metrics import ServerMetrics


class _Row(NamedTuple):
    """A route. `name` is that of the handler's method, and of its operation in the OpenAPI document.

    `Router.add` describes the options. Handlers that are loaded later need `reads_query` here: their operation is not
    known yet.
    """

    method: str
    path: str
    name: str
    scope: Scope = ADMIN
    limited: bool = False
    public: bool = False
    reads_query: bool = False


_RESPONSE = "/v1/responses/{response_id}"
_RESPONSES = (
    _Row("POST", "/v1/responses", "create", INFERENCE, limited=True),
    _Row("POST", "/v1/responses/input_tokens", "count_input_tokens", INFERENCE, limited=True),
    _Row("POST", "/v1/responses/compact", "compact", INFERENCE, limited=True),
    _Row("GET", _RESPONSE, "retrieve", READ),
    _Row("DELETE", _RESPONSE, "delete", INFERENCE),
    _Row("POST", f"{_RESPONSE}/cancel", "cancel", INFERENCE),
    _Row("GET", f"{_RESPONSE}/input_items", "list_input_items", READ),
)
_CONVERSATION = "/v1/conversations/{conversation_id}"
_ITEM = f"{_CONVERSATION}/items/{{item_id}}"
_CONVERSATIONS = (
    _Row("POST", "/v1/conversations", "create", INFERENCE),
    _Row("GET", _CONVERSATION, "retrieve", READ),
    _Row("POST", _CONVERSATION, "update", INFERENCE),
    _Row("DELETE", _CONVERSATION, "delete", INFERENCE),
    _Row("POST", f"{_CONVERSATION}/items", "add_items", INFERENCE),
    _Row("GET", f"{_CONVERSATION}/items", "list_items", READ),
    _Row("GET", _ITEM, "retrieve_item", READ),
    _Row("DELETE", _ITEM, "delete_item", INFERENCE),
)
_PROMPTS = (
    _Row("POST", "/v1/prompts", "define", INFERENCE),
    _Row("GET", "/v1/prompts", "list_all", READ),
    _Row("GET", "/v1/prompts/{prompt_id}", "retrieve", READ),
    _Row("DELETE", "/v1/prompts/{prompt_id}", "delete", INFERENCE, reads_query=True),
)
_AGENT = (_Row("POST", "/v1/agent/execute", "execute", INFERENCE, limited=True),)
_FILE = "/v1/files/{file_id}"
_FILES = (
    _Row("POST", "/v1/files", "create", INFERENCE),
    _Row("GET", "/v1/files", "list_all", READ, reads_query=True),
    _Row("GET", _FILE, "retrieve", READ),
    _Row("DELETE", _FILE, "delete", INFERENCE),
    _Row("GET", f"{_FILE}/content", "download", READ),
)
_UPLOAD = "/v1/uploads/{upload_id}"
_UPLOADS = (
    _Row("POST", "/v1/uploads", "create", INFERENCE),
    _Row("POST", f"{_UPLOAD}/parts", "add_part", INFERENCE),
    _Row("POST", f"{_UPLOAD}/complete", "complete", INFERENCE),
    _Row("POST", f"{_UPLOAD}/cancel", "cancel", INFERENCE),
)
_STORE = "/v1/vector_stores/{vector_store_id}"
_STORE_FILE = f"{_STORE}/files/{{file_id}}"
_BATCH = f"{_STORE}/file_batches/{{batch_id}}"
_VECTOR_STORES = (
    _Row("POST", "/v1/vector_stores", "create", INFERENCE),
    _Row("GET", "/v1/vector_stores", "list_all", READ, reads_query=True),
    _Row("GET", _STORE, "retrieve", READ),
    _Row("POST", _STORE, "update", INFERENCE),
    _Row("DELETE", _STORE, "delete", INFERENCE),
    _Row("POST", f"{_STORE}/search", "search", INFERENCE),
    _Row("POST", f"{_STORE}/files", "attach", INFERENCE),
    _Row("GET", f"{_STORE}/files", "list_files", READ, reads_query=True),
    _Row("GET", _STORE_FILE, "retrieve_file", READ),
    _Row("POST", _STORE_FILE, "update_file", INFERENCE),
    _Row("DELETE", _STORE_FILE, "detach", INFERENCE),
    _Row("GET", f"{_STORE_FILE}/content", "load_content", READ),
    _Row("POST", f"{_STORE}/file_batches", "create_batch", INFERENCE),
    _Row("GET", _BATCH, "retrieve_batch", READ),
    _Row("POST", f"{_BATCH}/cancel", "cancel_batch", INFERENCE),
    _Row("GET", f"{_BATCH}/files", "list_batch_files", READ, reads_query=True),
)
_CONTAINER = "/v1/containers/{container_id}"
_CONTAINER_FILE = f"{_CONTAINER}/files/{{file_id}}"
_CONTAINERS = (
    _Row("POST", "/v1/containers", "create", INFERENCE),
    _Row("GET", "/v1/containers", "list_all", READ, reads_query=True),
    _Row("GET", _CONTAINER, "retrieve", READ),
    _Row("DELETE", _CONTAINER, "delete", INFERENCE),
    _Row("POST", f"{_CONTAINER}/files", "add_file", INFERENCE),
    _Row("GET", f"{_CONTAINER}/files", "list_files", READ, reads_query=True),
    _Row("GET", _CONTAINER_FILE, "retrieve_file", READ),
    _Row("GET", f"{_CONTAINER_FILE}/content", "download", READ),
    _Row("DELETE", _CONTAINER_FILE, "delete_file", INFERENCE),
)
_PROJECT = "/v1/organization/projects/{project_id}"
_KEY = f"{_PROJECT}/api_keys/{{api_key_id}}"
_PROJECTS = (
    _Row("GET", "/v1/organization/projects", "list_all", ADMIN, reads_query=True),
    _Row("POST", "/v1/organization/projects", "create", ADMIN),
    _Row("GET", _PROJECT, "retrieve", ADMIN),
    _Row("POST", _PROJECT, "update", ADMIN),
    _Row("POST", f"{_PROJECT}/archive", "archive", ADMIN),
    _Row("GET", f"{_PROJECT}/api_keys", "list_keys", ADMIN, reads_query=True),
    _Row("POST", f"{_PROJECT}/api_keys", "create_key", ADMIN),
    _Row("GET", _KEY, "retrieve_key", ADMIN),
    _Row("DELETE", _KEY, "delete_key", ADMIN),
)
_USAGE = (
    _Row("GET", "/v1/organization/usage/completions", "list_usage", ADMIN, reads_query=True),
    _Row("GET", "/v1/organization/costs", "list_costs", ADMIN, reads_query=True),
)
_MODELS = (
    _Row("GET", "/v1/models", "list_all", READ),
    _Row("GET", "/v1/models/{model...}", "retrieve", READ),
)
_HEALTH = (
    _Row("GET", "/", "greet", public=True),
    _Row("GET", "/healthz", "live", public=True),
    _Row("GET", "/readyz", "ready", public=True),
)
_DOCUMENT = (_Row("GET", "/openapi.json", "show", public=True),)


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
    _add_routes(router, _RESPONSES, ResponseHandlers(engine, settings, keepalive=keepalive, metrics=metrics))
    _add_websocket(router)
    if not settings.stateless:
        _add_routes(router, _CONVERSATIONS, ConversationHandlers(engine, settings))
        _add_routes(router, _PROMPTS, PromptHandlers(engine, settings))
        _add_agent(router, engine, settings, keepalive)
        _add_files(router, engine, settings)
        if engine.containers is not None:
            handlers = _LazyHandlers("containers", "ContainerHandlers", lambda kind: kind(engine.containers, settings))
            handlers.add_routes(router, _CONTAINERS)
        _add_organization(router, engine, get_settings or (lambda: settings))
    _add_routes(router, _MODELS, ModelHandlers(engine))
    _add_routes(router, _HEALTH, HealthHandlers(engine))
    if metrics is not None:
        _add_metrics(router, metrics, key=settings.metrics_key)
    _add_document(router, requires_key=requires_key or (lambda: bool(settings.api_keys)))
    return router


def _add_routes(router: Router, rows: Iterable[_Row], handlers: Any) -> None:
    """Add routes to the methods of `handlers`."""
    for row in rows:
        _add_route(router, row, getattr(handlers, row.name), handlers.operations[row.name])


def _add_route(router: Router, row: _Row, handler: Handler, operation: Operation | Callable[[], Operation]) -> None:
    router.add(
        row.method,
        row.path,
        handler,
        operation,
        public=row.public,
        scope=row.scope,
        limited=row.limited,
        reads_query=row.reads_query,
    )


class _LazyHandlers:
    """Handlers that their first request imports and makes, because most servers never need their module.

    `make` makes them from their class.
    """

    def __init__(self, module: str, name: str, make: Callable[[Any], Any]) -> None:
        self._module = f"antiphon.server.{module}"
        self._name = name
        self._make = make

    @functools.cached_property
    def handlers(self) -> Any:
        return self._make(self._import_class())

    def add_routes(self, router: Router, rows: Iterable[_Row]) -> None:
        for row in rows:
            _add_route(router, row, self._bind(row.name), functools.partial(self._find_operation, row.name))

    def _import_class(self) -> Any:
        return getattr(importlib.import_module(self._module), self._name)

    def _find_operation(self, name: str) -> Operation:
        operation: Operation = self._import_class().operations[name]
        return operation

    def _bind(self, name: str) -> Handler:
        async def handle(http_request: HttpRequest) -> None:
            await getattr(self.handlers, name)(http_request)

        return handle


def _add_websocket(router: Router) -> None:
    operation = Operation(
        id="connectResponses",
        summary="Open a WebSocket to create and steer responses.",
        errors=(UpgradeRequired, Unavailable),
    )
    router.add("GET", "/v1/responses", require_upgrade, operation, scope=INFERENCE)


def _add_agent(router: Router, engine: Engine, settings: Settings, keepalive: Keepalive) -> None:
    agents = _LazyHandlers("agent", "AgentHandlers", lambda kind: kind(engine, settings, keepalive=keepalive))
    if settings.agent_tools:
        # An error in configured tools must stop the start.
        _add_routes(router, _AGENT, agents.handlers)
    else:
        agents.add_routes(router, _AGENT)


def _add_files(router: Router, engine: Engine, settings: Settings) -> None:
    def make(kind: Any) -> Any:
        return kind(engine.file_service, settings)

    _LazyHandlers("files", "FileHandlers", make).add_routes(router, _FILES)
    _LazyHandlers("files", "UploadHandlers", make).add_routes(router, _UPLOADS)
    _LazyHandlers("vector_stores", "VectorStoreHandlers", make).add_routes(router, _VECTOR_STORES)


def _add_organization(router: Router, engine: Engine, get_settings: Callable[[], Settings]) -> None:
    projects = _LazyHandlers(
        "organization.projects", "ProjectHandlers", lambda kind: kind(engine.admin_store, get_settings)
    )
    projects.add_routes(router, _PROJECTS)
    usage = _LazyHandlers("organization.usage", "UsageHandlers", lambda kind: kind(engine, get_settings))
    usage.add_routes(router, _USAGE)


def _add_document(router: Router, *, requires_key: Callable[[], bool]) -> None:
    document = _LazyHandlers("openapi", "OpenApiHandler", lambda kind: kind(router, requires_key=requires_key))
    document.add_routes(router, _DOCUMENT)


def _add_metrics(router: Router, metrics: "ServerMetrics", *, key: str) -> None:
    from antiphon.server.metrics.handler import MetricsHandler

    # With a key of its own, the handler checks it. Otherwise keys of all projects with the scope `admin` are accepted.
    router.add("GET", "/metrics", MetricsHandler(metrics, key=key).show, public=bool(key))
