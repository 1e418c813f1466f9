"""What a store keeps, and the questions it answers. Every row belongs to a project, and every question names one."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import Response


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response with the input items it was asked with (only its own, not the chain's)."""

    response: Response
    input: list[Item | Unknown]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One response of a chain, cut down to what a continuation reads: its input items, then its output items."""

    id: str
    previous_response_id: str | None
    items: list[Item | Unknown]


class Store(Protocol):
    """A place for finished responses.

    `save` returns once the response is durable: whatever was acknowledged survives a crash. Stores hand out fresh
    objects: changing one does not change what is kept. Before `open` and after `close`, every question raises
    Unavailable; a store that breaks (a full disk, a damaged row) raises ServerError.
    """

    async def open(self) -> None:
        """Connect and bring the schema up to date. Called once. Raises ConfigError when there is no way in."""

    async def close(self) -> None:
        """Finish what is queued and disconnect."""

    async def save(self, project: str, stored: StoredResponse) -> None:
        """Keep a response, replacing an earlier version of the same id.

        The response is encoded before the first wait, and kept even if the caller is cancelled while waiting.
        """

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        """One response, or None."""

    async def delete(self, project: str, response_id: str) -> bool:
        """Forget a response. False when there was none."""

    async def chain(self, project: str, response_id: str) -> Sequence[Link]:
        """The response and its ancestors through `previous_response_id`, oldest first.

        Empty when the response itself is unknown. An ancestor that was deleted ends the walk: the first element then
        still names a `previous_response_id`, and the caller decides what to make of the gap.
        """
