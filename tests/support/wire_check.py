"""Validate every payload that a test server sends against the reference schemas.

`RecordingApp` records the payloads while a test runs. `check_recorded` validates them after the test, each distinct
shape once per process. `tests/behaviour/divergences.toml` lists the violations that are intended.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from antiphon.server.http import WRITE_BODY, Message, Receive, Scope, Send
from antiphon.server.websocket.socket import WRITE_NOW
from support.references import Violation, list_references

App = Callable[[Scope, Receive, Send], Any]

DIVERGENCES = Path(__file__).parents[1] / "behaviour" / "divergences.toml"

_MAX_BYTES = 2**18  # of one payload; tests of limits send larger ones of the same shapes
# Values that select a schema, and so are part of the shape. Of other strings only the type is.
_SELECTING_FIELDS = frozenset({"type", "object", "status", "role", "phase", "reason", "mode", "effort", "summary"})
# Fields whose value is JSON of the client.
_OPAQUE_FIELDS = frozenset({"parameters", "schema", "output_schema", "metadata", "variables", "filters"})
_ROUTES = [
    ("POST", "/v1/responses", "response"),
    ("GET", "/v1/responses/[^/]+", "response"),
    ("POST", "/v1/responses/[^/]+/cancel", "response"),
    ("GET", "/v1/responses/[^/]+/input_items", "response_items"),
    ("POST", "/v1/responses/input_tokens", "input_tokens"),
    ("POST", "/v1/responses/compact", "compaction"),
    ("POST", "/v1/conversations(/[^/]+)?", "conversation"),
    ("GET", "/v1/conversations/[^/]+", "conversation"),
    ("DELETE", "/v1/conversations/[^/]+", "deleted_conversation"),
    ("(GET|POST)", "/v1/conversations/[^/]+/items", "conversation_items"),
    ("GET", "/v1/conversations/[^/]+/items/[^/]+", "conversation_item"),
    ("DELETE", "/v1/conversations/[^/]+/items/[^/]+", "conversation"),
    ("GET", "/v1/models", "models"),
    ("GET", "/v1/models/.+", "model"),
]


class Recorded(NamedTuple):
    kind: str
    body: bytes


class Divergence(NamedTuple):
    """Violations that are intended. `paths` are paths of violations, with `*` for any text.

    `example` names requests in tests/behaviour/test_divergences.py that cause such a violation of every reference.
    """

    name: str
    references: frozenset[str]
    paths: tuple[str, ...]
    keywords: frozenset[str]
    source: str
    example: str

    def covers(self, violation: Violation) -> bool:
        return (
            violation.reference in self.references
            and violation.keyword in self.keywords
            and any(_compile(path).fullmatch(violation.path) for path in self.paths)
        )


@cache
def _compile(path: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, path.split("*"))))


@cache
def load_divergences() -> tuple[Divergence, ...]:
    entries = tomllib.loads(DIVERGENCES.read_text(encoding="utf-8"))["divergence"]
    return tuple(
        Divergence(
            entry["name"],
            frozenset(entry["references"]),
            tuple(entry["paths"]),
            frozenset(entry["keywords"]),
            entry["source"],
            entry["example"],
        )
        for entry in entries
    )


class RecordingApp:
    """An ASGI application that records the JSON that another one sends."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            recorder = _HttpRecorder(scope, send)
            await self._app(_wrap_extension(scope, WRITE_BODY, recorder.wrap_write), receive, recorder.send)
        elif scope["type"] == "websocket":
            messages = _SocketRecorder(send)
            await self._app(_wrap_extension(scope, WRITE_NOW, messages.wrap_write), receive, messages.send)
        else:
            await self._app(scope, receive, send)


def _wrap_extension(scope: Scope, name: str, wrap: Callable[[Any], Any]) -> Scope:
    extensions = scope.get("extensions") or {}
    if name not in extensions:
        return scope
    functions = {**extensions[name], "write": wrap(extensions[name]["write"])}
    functions.pop("respond", None)  # whole responses are sent through `send`
    return {**scope, "extensions": {**extensions, name: functions}}


class _HttpRecorder:
    def __init__(self, scope: Scope, send: Send) -> None:
        self._method: str = scope["method"]
        self._path: str = scope["path"]
        self._send = send
        self._status = 0
        self._is_stream = False
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = (b"content-type", b"text/event-stream") in message["headers"]
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._record()

    def wrap_write(self, write: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        def write_and_record(chunk: bytes) -> bool:
            written = write(chunk)
            if written:
                self._body += chunk
            return written

        return write_and_record

    def _record(self) -> None:
        if self._is_stream and self._path.startswith("/v1/responses"):
            lines = bytes(self._body).split(b"\n")
            data = (line[6:] for line in lines if line.startswith(b"data: {"))
            _recorded.extend(Recorded("event", line) for line in data)
        elif not self._is_stream and self._body:
            kind = find_kind(self._method, self._path, self._status)
            if kind is not None:
                _recorded.append(Recorded(kind, bytes(self._body)))


class _SocketRecorder:
    def __init__(self, send: Send) -> None:
        self._send = send

    async def send(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "websocket.send" and message.get("text"):
            _recorded.append(Recorded("socket_message", message["text"].encode()))

    def wrap_write(self, write: Callable[[list[bytes]], bool]) -> Callable[[list[bytes]], bool]:
        def write_and_record(lines: list[bytes]) -> bool:
            written = write(lines)
            if written:
                _recorded.extend(Recorded("socket_message", line) for line in lines)
            return written

        return write_and_record


_recorded: list[Recorded] = []
_known_shapes: set[tuple[Any, ...]] = set()


def find_kind(method: str, path: str, status: int) -> str | None:
    """Return the kind of the JSON body of a response, or None for endpoints outside of the API."""
    if path.startswith(("/v1/agent", "/v1/prompts")) or not path.startswith("/v1/"):
        return None
    if status >= 400:
        return "error"
    found = (kind for verb, route, kind in _ROUTES if re.fullmatch(verb, method) and re.fullmatch(route, path))
    return next(found, None)


def take_recorded() -> list[Recorded]:
    """Remove and return the recorded payloads."""
    taken = _recorded[:]
    del _recorded[: len(taken)]
    return taken


def check_recorded() -> list[str]:
    """Validate the recorded payloads of new shapes. Return the violations that are not intended."""
    faults: dict[str, None] = {}
    for kind, payload in _select_new(take_recorded()):
        for violation in find_violations(kind, payload):
            if not any(divergence.covers(violation) for divergence in load_divergences()):
                faults[f"{kind}: {violation}"] = None
    return list(faults)


def find_violations(kind: str, payload: Any) -> Iterator[Violation]:
    if kind == "socket_message":
        kind = "socket_error" if "status" in payload else "event"
    for reference in list_references():
        yield from reference.find_violations(kind, payload)


def _select_new(recorded: Iterable[Recorded]) -> Iterator[tuple[str, Any]]:
    for kind, body in recorded:
        if len(body) > _MAX_BYTES:
            continue
        try:
            payload = json.loads(body)
        except (ValueError, RecursionError):
            continue  # tests of invalid upstreams and of deep nesting have assertions of their own
        shape = (kind, make_shape(payload))
        if shape not in _known_shapes:
            _known_shapes.add(shape)
            yield kind, payload


def make_shape(value: Any, field: str = "") -> Any:
    """Return a hashable description of the types in a value. Payloads of one shape have the same violations."""
    if isinstance(value, dict):
        if field in _OPAQUE_FIELDS:
            return "object"
        return frozenset((name, make_shape(inner, name)) for name, inner in value.items())
    if isinstance(value, list):
        return ("list", frozenset(make_shape(inner) for inner in value))
    if isinstance(value, str) and field in _SELECTING_FIELDS:
        return value
    return type(value).__name__
