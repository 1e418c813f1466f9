"""From a method and a path to a handler."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from msgspec import Struct

from antiphon.errors import AntiphonError, MethodNotAllowed, NotFound
from antiphon.server.http import Exchange


class Operation(Struct, frozen=True, kw_only=True):
    """`body`, `query` and `answer` are the types that the handler itself decodes and encodes.

    One without an `answer` switches to a WebSocket. `streams` says that the answer may be a stream of events instead,
    and `events` what these are, by their names, if they are not those of a response. `errors` are those that do not
    follow from the route's form, as a missing key does, or a path that leads to nothing; `failure` is the body of those
    that the handler itself answers with, if it is not the usual one.
    """

    id: str
    summary: str
    answer: Any = None
    body: Any = None
    optional_body: bool = False
    query: type[Struct] | None = None
    streams: bool = False
    events: Mapping[str, Any] = {}
    failure: Any = None
    errors: tuple[type[AntiphonError], ...] = ()


Handler = Callable[[Exchange], Awaitable[None]]


class Route(NamedTuple):
    """A handler, and whether it answers without a key, and reads the query."""

    handler: Handler
    public: bool = False
    reads_query: bool = False


class Entry(NamedTuple):
    """A line of the table, as it was added."""

    method: str
    path: str
    public: bool
    operation: Operation | None


Methods = dict[str, Route]

_PARAMETER = re.compile(r"\{\w+(\.\.\.)?\}")


class _Pattern(NamedTuple):
    expression: re.Pattern[str]
    methods: Methods


class Router:
    """The table of routes. Plain paths are found in a dict; the few with parameters are tried in turn.

    `note` is added to what is said of a path that is not in it.
    """

    def __init__(self, *, note: str = "") -> None:
        self._note = note
        self._plain: dict[str, Methods] = {}
        self._patterns: dict[str, _Pattern] = {}
        self.entries: list[Entry] = []

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        operation: Operation | None = None,
        *,
        public: bool = False,
        reads_query: bool = False,
    ) -> None:
        """Add a route. `{name}` in the path takes one segment, `{name...}` takes slashes too.

        `reads_query` is of use where the operation has no query, but something is to be said to one that comes.
        """
        self.entries.append(Entry(method, path, public, operation))
        if "{" in path:
            methods = self._patterns.setdefault(path, _Pattern(_compile(path), {})).methods
        else:
            methods = self._plain.setdefault(path, {})
        reads_query = reads_query or (operation is not None and operation.query is not None)
        methods[method] = Route(handler, public=public, reads_query=reads_query)
        if method == "GET":
            methods["HEAD"] = methods[method]
        methods.setdefault("OPTIONS", Route(_list_methods(methods), public=True))

    def find(self, exchange: Exchange) -> Route:
        """The route of a request, with the path's parameters put into the exchange."""
        methods = self._plain.get(exchange.path) or self._match(exchange)
        if methods is None:
            raise NotFound(f"There is no {_shorten(exchange.path)} here.{self._note}", code="unknown_url")
        route = methods.get(exchange.method)
        if route is None:
            exchange.extra_headers.append(_allow(methods))
            raise MethodNotAllowed(f"{exchange.method} does not go with this URL; {', '.join(methods)} do.")
        return route

    def _match(self, exchange: Exchange) -> Methods | None:
        # As it came: a slash in an id comes encoded, and is none between two segments.
        path = quote(exchange.path) if exchange.raw_path is None else exchange.raw_path.decode("latin-1")
        for pattern in self._patterns.values():
            found = pattern.expression.fullmatch(path)
            if found:
                exchange.params = tuple(map(unquote, found.groups()))
                return pattern.methods
        return None


def _compile(path: str) -> re.Pattern[str]:
    parts = _PARAMETER.split(path)
    # Every other part is what stood between the braces.
    parts[1::2] = ["(.+)" if dots else "([^/]+)" for dots in parts[1::2]]
    parts[::2] = [re.escape(text) for text in parts[::2]]
    return re.compile("".join(parts), re.DOTALL)


def _list_methods(methods: Methods) -> Handler:
    async def list_methods(exchange: Exchange) -> None:
        exchange.extra_headers.append(_allow(methods))
        await exchange.answer(204, b"")

    return list_methods


def _allow(methods: Methods) -> tuple[bytes, bytes]:
    return (b"allow", ", ".join(methods).encode())


def _shorten(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:200]}…"
