"""The transport of an agent's requests to a model: HTTP, WebSockets, or an engine of this process."""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from antiphon.errors import ConfigError, UpstreamError
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import Unknown
from antiphon.upstream.error_mapping import map_api_error
from antiphon.upstream.http1.request import merge_headers
from antiphon.upstream.options import is_header_value

Events = AsyncGenerator[Sequence[Event | Unknown], None]

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})
_COLLECTED = frozenset({*TERMINAL, "response.output_item.done", "error"})
_UNUSED = frozenset({"response.created", "response.queued", "response.in_progress"})
_COLLECTED_CLASSES = frozenset(codec.EVENTS.members[name] for name in _COLLECTED)

_LAST = TERMINAL | {"error"}
_LAST_CLASSES = frozenset(codec.EVENTS.members[name] for name in _LAST)

# Checks that the input is JSON.
_unused_decoder = msgspec.json.Decoder(msgspec.Raw)


def check_base_url(base_url: object, *, schemes: Sequence[str] = ("http://", "https://")) -> None:
    """Raise ConfigError if the URL of a server is not a text, or has another scheme, no host or an endpoint's path."""
    if not isinstance(base_url, str):
        raise ConfigError(f"base_url: expected a text, got {type(base_url).__name__}.")
    if not base_url.startswith(tuple(schemes)):
        raise ConfigError(f"base_url: {base_url!r} must begin with {', '.join(schemes[:-1])} or {schemes[-1]}.")
    if not base_url.partition("://")[2].partition("/")[0].partition("?")[0]:
        raise ConfigError(f"base_url: {base_url!r} has no host.")
    if base_url.partition("?")[0].rstrip("/").endswith("/responses"):
        raise ConfigError(f"base_url: {base_url!r} must not include /responses. The agent adds it.")


def make_headers(headers: Mapping[str, str], api_key: object) -> dict[str, str]:
    """Return the headers of all requests. Raises ConfigError for an API key that cannot be part of a header."""
    if not api_key:
        return dict(headers)
    if not isinstance(api_key, str) or not is_header_value(api_key):
        # The message does not show the key.
        raise ConfigError("api_key: it must be one line of ASCII text, without surrounding spaces or line breaks.")
    return merge_headers({"Authorization": f"Bearer {api_key}"}, headers)


def describe_address(url: str) -> str:
    """Return the host and the port of a URL for messages, without a user name and a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "the URL is not valid"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}" if port is None else f"{host}:{port}"


def decode_event(name: str | None, body: bytes) -> Event | Unknown:
    """Decode an event. `name` is its type in the stream. Raise ValueError if it is not JSON.

    The first events of a response contain the whole request and are not used: they stay `Unknown`.
    """
    if name not in _UNUSED:
        return codec.decode_event(body)
    if not body.isascii():
        body.decode()  # msgspec does not check strings in skipped fields
    with contextlib.suppress(RecursionError):  # nested too deeply
        _unused_decoder.decode(body)
    return Unknown(body)


def is_last(event: Event | Unknown) -> bool:
    """Return True if an event is the last one of a response."""
    return type(event) in _LAST_CLASSES or (isinstance(event, Unknown) and event.type in _LAST)


class Transport(Protocol):
    """Sends requests of the Responses API and streams their events. Closing the stream stops the model."""

    async def stream(self, request: dict[str, Any]) -> Events:
        """Send a request and return its events. A rejected request is raised here as an `AntiphonError`."""

    async def close(self) -> None:
        """Release the connections."""


class ResponseCollector:
    """Collects the events of one response. Pass them to `feed`; `finish` returns the response."""

    def __init__(self) -> None:
        self._items: dict[tuple[int, str], JsonObject] = {}
        self._response: JsonObject | None = None
        self._error: Any = None

    def feed(self, batch: Sequence[Event | Unknown]) -> None:
        for event in batch:
            if type(event) in _COLLECTED_CLASSES or (isinstance(event, Unknown) and event.type in _COLLECTED):
                self._collect(msgspec.json.decode(codec.encode(event)))

    @property
    def items(self) -> list[JsonObject]:
        """The finished items, by output index. Items with the same index stay in the order of arrival."""
        return [self._items[key] for key in sorted(self._items, key=lambda key: key[0])]

    @property
    def response(self) -> JsonObject | None:
        """The response of the terminal event, even of a failed one."""
        return self._response

    def finish(self) -> JsonObject:
        """Return the response. Raises if it failed, or if the stream ended before it."""
        if self._response is None:
            if self._error is not None:
                raise map_api_error(None, self._error)
            raise UpstreamError("The stream ended before the response did.")
        response = self._response
        if response.get("status") == "failed":
            raise map_api_error(None, response.get("error") or self._error or {})
        if not response.get("output"):
            response["output"] = self.items
        return response

    def _collect(self, event: JsonObject) -> None:
        kind = event["type"]
        if kind == "error":
            self._error = event.get("error") or event
        elif kind in TERMINAL:
            # Events after the first terminal one do not count.
            if self._response is None:
                self._response = _require_object(event.get("response") or {})
        else:
            self._add_item(event.get("output_index"), _require_object(event.get("item")))

    def _add_item(self, index: Any, item: JsonObject) -> None:
        """Add an item, or replace an earlier version of it.

        Another item with the same index is added: some servers send wrong indexes, or none.
        """
        position = index if isinstance(index, int) else len(self._items)
        self._items[position, str(item.get("id") or f"item {len(self._items)}")] = item


def _require_object(value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise UpstreamError("The server sent a malformed event.")
    return value
