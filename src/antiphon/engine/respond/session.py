"""What one connection remembers of its own responses, so that it can continue those that are not stored.

Nobody else sees it, and it ends with the connection.
"""

from collections.abc import Sequence

import msgspec

from antiphon.protocol import codec
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown

MOST_RESPONSES = 64
MOST_BYTES = 64 * 1024 * 1024


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """A response that can be continued: everything a continuation reads, and how many bytes that is on the wire.

    `lane` is where it was made. One that is `stored` counts only for as long as the store has it, too.
    """

    id: str
    previous: str | None
    lane: str | None
    stored: bool
    items: Sequence[Item | Unknown]
    tools: list[Tool | Unknown]
    size: int


class Session:
    """The latest responses of a connection. They are forgotten oldest first, the latest of each lane last of all."""

    __slots__ = ("_kept", "_latest", "_most_bytes", "_most_responses")

    def __init__(self, *, most_responses: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most_responses = most_responses
        self._most_bytes = most_bytes
        self._kept: dict[str, Remembered] = {}
        self._latest: dict[str | None, str] = {}

    def find(self, response_id: str | None) -> Remembered | None:
        return None if response_id is None else self._kept.get(response_id)

    def remember(
        self, response: Response, read: Sequence[Item | Unknown], *, asked: Sequence[Item | Unknown], lane: str | None
    ) -> None:
        """Keep a response that has ended. `read` is all that its model has read, `asked` its own part of that.

        What the store has whole need not be kept here.
        """
        previous = self.find(response.previous_response_id)
        if response.store and previous is None:
            return
        # Most of a long history has been measured with the response before.
        unmeasured = read if previous is None else asked
        size = len(codec.encode([*unmeasured, *response.output])) + (previous.size if previous is not None else 0)
        if size > self._most_bytes:  # it would push out everything else
            return
        self._kept[response.id] = Remembered(
            id=response.id,
            previous=response.previous_response_id,
            lane=lane,
            stored=response.store,
            items=[*read, *response.output],
            tools=response.tools,
            size=size,
        )
        self._latest[lane] = response.id
        while len(self._kept) > self._most_responses or self._weigh() > self._most_bytes:
            self.forget(next((each for each in self._kept if not self._is_latest(each)), next(iter(self._kept))))

    def forget(self, response_id: str | None) -> None:
        """A response that a continuation has failed on is not to be continued here any more."""
        forgotten = self._kept.pop(response_id, None) if response_id is not None else None
        if forgotten is not None and self._latest.get(forgotten.lane) == response_id:
            del self._latest[forgotten.lane]

    def _is_latest(self, response_id: str) -> bool:
        return self._latest.get(self._kept[response_id].lane) == response_id

    def _weigh(self) -> int:
        """A response shares its items with those it continues: only the ends of chains count."""
        continued = {each.previous for each in self._kept.values()}
        return sum(each.size for each in self._kept.values() if each.id not in continued)
