"""From a method and a path to a handler."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from antiphon.errors import MethodNotAllowed, NotFound
from antiphon.server.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None]]


class Route(NamedTuple):
    """A handler, and whether it answers without a key."""

    handler: Handler
    public: bool = False


Methods = dict[str, Route]


class _Pattern(NamedTuple):
    prefix: str
    suffix: str
    slashes: bool
    methods: Methods

    def match(self, path: str) -> str:
        """The part of the path that the pattern leaves open, or nothing."""
        if not (path.startswith(self.prefix) and path.endswith(self.suffix)):
            return ""
        param = path[len(self.prefix) : len(path) - len(self.suffix)]
        return "" if "/" in param and not self.slashes else param


class Router:
    """The table of routes. Plain paths are found in a dict; the few with a parameter are tried in turn."""

    def __init__(self) -> None:
        self._plain: dict[str, Methods] = {}
        self._patterns: dict[str, _Pattern] = {}

    def add(self, method: str, path: str, handler: Handler, *, public: bool = False) -> None:
        """Add a route. `{name}` in the path takes one segment, `{name...}` at its end takes slashes too."""
        prefix, brace, rest = path.partition("{")
        if brace:
            name, _, suffix = rest.partition("}")
            pattern = _Pattern(prefix, suffix, slashes=name.endswith("..."), methods={})
            methods = self._patterns.setdefault(path, pattern).methods
        else:
            methods = self._plain.setdefault(path, {})
        methods[method] = Route(handler, public=public)
        if method == "GET":
            methods["HEAD"] = methods[method]
        methods.setdefault("OPTIONS", Route(_list_methods(methods), public=True))

    def find(self, exchange: Exchange) -> Route:
        """The route of a request, with the path's parameter put into the exchange."""
        methods = self._plain.get(exchange.path) or self._match(exchange)
        if methods is None:
            raise NotFound(f"There is no {_shorten(exchange.path)} here.", code="unknown_url")
        route = methods.get(exchange.method)
        if route is None:
            exchange.extra_headers.append(_allow(methods))
            raise MethodNotAllowed(f"{exchange.method} does not go with this URL; {', '.join(methods)} do.")
        return route

    def _match(self, exchange: Exchange) -> Methods | None:
        for pattern in self._patterns.values():
            param = pattern.match(exchange.path)
            if param:
                exchange.param = param
                return pattern.methods
        return None


def _list_methods(methods: Methods) -> Handler:
    async def list_methods(exchange: Exchange) -> None:
        exchange.extra_headers.append(_allow(methods))
        await exchange.answer(204, b"")

    return list_methods


def _allow(methods: Methods) -> tuple[bytes, bytes]:
    return (b"allow", ", ".join(methods).encode())


def _shorten(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:200]}…"
