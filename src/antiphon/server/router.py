"""Routing: finds the handler for a method and a path."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from msgspec import Struct

from antiphon.errors import AntiphonError, MethodNotAllowed, NotFound
from antiphon.server.http import HttpRequest
from antiphon.server.scopes import ADMIN, Scope

Handler = Callable[[HttpRequest], Awaitable[None]]

_PARAMETER = re.compile(r"\{\w+(\.\.\.)?\}")
_MAX_SHOWN_PATH = 200
_RESPONSES_PATH = "/v1/responses"


class Operation(Struct, frozen=True, kw_only=True):
    """Describes a route for the OpenAPI document.

    The types are those that the handler itself decodes and encodes. An operation without a `response_type` opens a
    WebSocket, unless it `returns_file`. With `file_field`, the body is a form with a file of this name, and its other
    fields are those of `body_type`. If `streams` is set, the response may be an event stream instead; `event_types` are
    its events by name, if they differ from those of a response. `errors` lists only errors that do not follow from the
    route, such as a missing key or an unknown id. `error_type` is the handler's error body, if it is not the standard
    one.
    """

    id: str
    summary: str
    response_type: Any = None
    body_type: Any = None
    optional_body: bool = False
    query_type: type[Struct] | None = None
    streams: bool = False
    event_types: Mapping[str, Any] = {}
    error_type: Any = None
    errors: tuple[type[AntiphonError], ...] = ()
    file_field: str = ""
    returns_file: bool = False


class Route(NamedTuple):
    """A handler. A `public` one needs no key, others one with `scope`. `path` is its pattern.

    If `reads_query` is set, it parses the query itself. A `limited` one counts as a request for rate limits.
    """

    handler: Handler
    public: bool = False
    reads_query: bool = False
    path: str = ""
    scope: Scope = ADMIN
    limited: bool = False


class RouteEntry(NamedTuple):
    """A route as it was added, for the OpenAPI document."""

    method: str
    path: str
    public: bool
    scope: Scope
    operation: Operation | Callable[[], Operation] | None


Methods = dict[str, Route]


class _Pattern(NamedTuple):
    expression: re.Pattern[str]
    methods: Methods


class Router:
    """The table of routes. Paths without parameters are in a dict; the few with parameters are tried in turn.

    `note` is appended to the error for an unknown path.
    """

    def __init__(self, *, note: str = "") -> None:
        self._note = note
        self._plain: dict[str, Methods] = {}
        self._patterns: dict[str, _Pattern] = {}
        self.entries: list[RouteEntry] = []

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        operation: Operation | Callable[[], Operation] | None = None,
        *,
        public: bool = False,
        scope: Scope = ADMIN,
        limited: bool = False,
        reads_query: bool = False,
    ) -> None:
        """Add a route. `{name}` in the path matches one segment, `{name...}` matches slashes too.

        Set `reads_query` if the handler parses the query although the operation documents none. A function in place of
        the operation is called when the OpenAPI document is made.
        """
        self.entries.append(RouteEntry(method, path, public, scope, operation))
        if "{" in path:
            methods = self._patterns.setdefault(path, _Pattern(_compile_path(path), {})).methods
        else:
            methods = self._plain.setdefault(path, {})
        reads_query = reads_query or (isinstance(operation, Operation) and operation.query_type is not None)
        methods[method] = Route(
            handler, public=public, reads_query=reads_query, path=path, scope=scope, limited=limited
        )
        if method == "GET":
            methods["HEAD"] = methods[method]
        methods.setdefault("OPTIONS", Route(_make_options_handler(methods), public=True, path=path))

    def is_public(self, http_request: HttpRequest) -> bool:
        """Return True if the path of a request is that of a public route without parameters."""
        route = self._plain.get(http_request.path, {}).get(http_request.method)
        return route is not None and route.public

    def find(self, http_request: HttpRequest) -> Route:
        """Return the route of a request and set the request's path parameters. Raises NotFound or MethodNotAllowed."""
        methods = self._plain.get(http_request.path) or self._match(http_request)
        if methods is None:
            hint = self._suggest_path(http_request.path)
            raise NotFound(f"Unknown path: {_shorten(http_request.path)}.{self._note}{hint}", code="unknown_url")
        route = methods.get(http_request.method)
        if route is None:
            http_request.extra_headers.append(_make_allow_header(methods))
            raise MethodNotAllowed(f"{http_request.method} is not allowed on this path. Allowed: {', '.join(methods)}.")
        http_request.route_path = route.path
        return route

    def _suggest_path(self, path: str) -> str:
        """Return a hint for clients with a wrong base URL, or for another API. It is empty if no path is similar."""
        segments = [segment for segment in path[:_MAX_SHOWN_PATH].split("/") if segment]
        while segments[:1] == ["v1"]:
            del segments[0]
        suggested = "/".join(["", "v1", *segments])
        if segments[-2:] == ["chat", "completions"] and _RESPONSES_PATH in self._plain:
            return f" This server has the Responses API: POST {_RESPONSES_PATH}."
        is_known = suggested in self._plain or any(
            pattern.expression.fullmatch(suggested) for pattern in self._patterns.values()
        )
        return f" Did you mean {suggested}?" if is_known and suggested != path else ""

    def _match(self, http_request: HttpRequest) -> Methods | None:
        # The raw path: an encoded slash is part of an id, and does not separate segments.
        path = quote(http_request.path) if http_request.raw_path is None else http_request.raw_path.decode("latin-1")
        for pattern in self._patterns.values():
            found = pattern.expression.fullmatch(path)
            if found:
                http_request.path_params = tuple(map(unquote, found.groups()))
                return pattern.methods
        return None


def _compile_path(path: str) -> re.Pattern[str]:
    parts = _PARAMETER.split(path)
    # Every other part is the group of the expression: the dots of a parameter, or None.
    parts[1::2] = ["(.+)" if dots else "([^/]+)" for dots in parts[1::2]]
    parts[::2] = [re.escape(text) for text in parts[::2]]
    return re.compile("".join(parts), re.DOTALL)


def _make_options_handler(methods: Methods) -> Handler:
    async def list_methods(http_request: HttpRequest) -> None:
        http_request.extra_headers.append(_make_allow_header(methods))
        await http_request.respond(204, b"")

    return list_methods


def _make_allow_header(methods: Methods) -> tuple[bytes, bytes]:
    return (b"allow", ", ".join(methods).encode())


def _shorten(path: str) -> str:
    return path if len(path) <= _MAX_SHOWN_PATH else f"{path[:_MAX_SHOWN_PATH]}…"
