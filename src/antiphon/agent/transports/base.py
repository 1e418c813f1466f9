"""How a request reaches a model: over HTTP, or straight into an engine of this process. Either way events come back."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec

from antiphon.errors import (
    AntiphonError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelError,
    PreviousResponseNotFound,
    RateLimited,
    ServerError,
    UnsupportedParameter,
    UpstreamError,
)
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import Unknown

Events = AsyncGenerator[Sequence[Event | Unknown], None]


class Transport(Protocol):
    """Takes requests of the Responses API, and streams what comes of them. Closing the stream stops the model."""

    async def stream(self, request: dict[str, Any]) -> Events:
        """Send a request. What is refused is raised here, as the error of ours that it is; the rest comes as events."""

    async def close(self) -> None:
        """Release the connections."""


TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})
_TOLD = frozenset({*TERMINAL, "response.output_item.done", "error"})

REFUSED = "upstream_refused"
LASTING = frozenset(
    {"insufficient_quota", "usage_limit_reached", "usage_not_included", "upstream_authentication", REFUSED}
)
"""What an error is called that will not be gone by the next time."""


class Gathering:
    """Feed it the events of one response; `finish` gives the response."""

    def __init__(self) -> None:
        self._items: dict[tuple[int, str], JsonObject] = {}
        self._response: JsonObject | None = None
        self._error: Any = None

    def feed(self, batch: Sequence[Event | Unknown]) -> None:
        for event in batch:
            if event.type in _TOLD:
                self._take(msgspec.json.decode(codec.encode(event)))

    def _take(self, event: JsonObject) -> None:
        kind = event["type"]
        if kind == "error":
            self._error = event.get("error") or event
        elif kind in TERMINAL:
            # The first end is the end, whatever is said after it.
            if self._response is None:
                self._response = _require_object(event.get("response") or {})
        else:
            self._keep(event.get("output_index"), _require_object(event.get("item")))

    def _keep(self, index: Any, item: JsonObject) -> None:
        """An item may be told again. Another one in its place is one more: servers count wrongly, or not at all."""
        place = index if isinstance(index, int) else len(self._items)
        self._items[place, str(item.get("id") or f"the {len(self._items)}th")] = item

    @property
    def items(self) -> list[JsonObject]:
        """What has come to its end so far, in its order. Those in one place stay in the order in which they came."""
        return [self._items[key] for key in sorted(self._items, key=lambda key: key[0])]

    @property
    def response(self) -> JsonObject | None:
        """The response as its last event has told it, one that failed too."""
        return self._response

    def finish(self) -> JsonObject:
        """The response. Raises if it failed, or if the stream broke off."""
        if self._response is None:
            if self._error is not None:
                raise as_error(None, self._error)
            raise UpstreamError("The stream ended before the response did.")
        response = self._response
        if response.get("status") == "failed":
            raise as_error(None, response.get("error") or self._error or {})
        if not response.get("output"):
            response["output"] = self.items
        return response


def _require_object(value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise UpstreamError("The server sent an event that makes no sense.")
    return value


_BY_CODE: dict[str, type[AntiphonError]] = {
    "previous_response_not_found": PreviousResponseNotFound,
    "unsupported_parameter": UnsupportedParameter,
    "context_length_exceeded": ContextLengthExceeded,
    "rate_limit_exceeded": RateLimited,
}


def as_error(status: int | None, told: Any, *, retry_after: float | None = None) -> AntiphonError:
    """The error of ours that a server's error object is. Some send a text alone."""
    error: JsonObject = told if isinstance(told, dict) else {"message": str(told)}
    code = error.get("code") or error.get("type")
    kind = _BY_CODE.get(str(code)) or _by_status(status, str(error.get("type")))
    message = str(error.get("message") or code or f"The server answered with status {status}.")
    ours = kind(message, param=error.get("param"), retry_after=retry_after)
    ours.code = str(code) if code else ours.code
    return ours


def _by_status(status: int | None, kind: str) -> type[AntiphonError]:
    if status == 429 or kind == "rate_limit_error":
        return RateLimited
    if kind == "model_error":
        return ModelError
    if (status is not None and 400 <= status < 500) or kind == "invalid_request_error":
        return InvalidRequest
    return ServerError if status is None else UpstreamError
