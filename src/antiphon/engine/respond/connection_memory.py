"""The memory of one connection: its latest responses, so that it can continue those that are not stored.

It is private to the connection and ends with it.
"""

from collections.abc import Sequence

import msgspec

from antiphon.protocol import codec
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown

MAX_RESPONSES = 64
MAX_BYTES = 64 * 1024 * 1024


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """A response that can be continued: all items that a continuation reads, and their size in bytes.

    `lane` is the lane of the connection that made it. A `stored` one is valid only while the store has it, too.
    """

    id: str
    previous: str | None
    lane: str | None
    stored: bool
    items: Sequence[Item | Unknown]
    tools: list[Tool | Unknown]
    size: int


class ConnectionMemory:
    """The latest responses of a connection. The oldest are evicted first, the latest of each lane last."""

    __slots__ = ("_latest", "_max_bytes", "_max_responses", "_responses")

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: dict[str, Remembered] = {}
        self._latest: dict[str | None, str] = {}

    def find(self, response_id: str | None) -> Remembered | None:
        return None if response_id is None else self._responses.get(response_id)

    def list_unmeasured(
        self, response: Response, context: Sequence[Item | Unknown], *, input_items: Sequence[Item | Unknown]
    ) -> list[Item | Unknown] | None:
        """Return the items of a new response to measure for `remember`. None if it will not be kept.

        The items before the input were measured with the previous response.
        """
        if self.find(response.previous_response_id) is not None:
            return [*input_items, *response.output]
        return None if response.store else [*context, *response.output]

    def remember(
        self,
        response: Response,
        context: Sequence[Item | Unknown],
        *,
        input_items: Sequence[Item | Unknown],
        lane: str | None,
        size: int | None = None,
    ) -> None:
        """Keep a response that has ended. `context` are all items that its model has read, with its own input.

        A response whose whole chain is in the store is not kept here. `size` are the bytes of the items that
        `list_unmeasured` returns. If it is not given, they are encoded to measure them.
        """
        unmeasured = self.list_unmeasured(response, context, input_items=input_items)
        if unmeasured is None:
            return
        if size is None:
            size = len(codec.encode(unmeasured))
        previous = self.find(response.previous_response_id)
        size += previous.size if previous is not None else 0
        if size > self._max_bytes:  # it would evict all others
            return
        self._responses[response.id] = Remembered(
            id=response.id,
            previous=response.previous_response_id,
            lane=lane,
            stored=response.store,
            items=[*context, *response.output],
            tools=response.tools,
            size=size,
        )
        self._latest[lane] = response.id
        while len(self._responses) > self._max_responses or self.measure() > self._max_bytes:
            self.forget(
                next((each for each in self._responses if not self._is_latest(each)), next(iter(self._responses)))
            )

    def forget(self, response_id: str | None) -> None:
        """Remove a response, after a continuation of it has failed."""
        removed = self._responses.pop(response_id, None) if response_id is not None else None
        if removed is not None and self._latest.get(removed.lane) == response_id:
            del self._latest[removed.lane]

    def clear(self) -> None:
        """Remove all responses."""
        self._responses.clear()
        self._latest.clear()

    def _is_latest(self, response_id: str) -> bool:
        return self._latest.get(self._responses[response_id].lane) == response_id

    def measure(self) -> int:
        """Return the total size. A response shares the items of those it continues, so only chain ends count."""
        continued = {each.previous for each in self._responses.values()}
        return sum(each.size for each in self._responses.values() if each.id not in continued)
