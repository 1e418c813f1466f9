"""Changes of background responses and their queue, as the processes with one store announce them to each other.

All of them are hints: a process that misses an announcement finds the change at its next poll.
"""

from collections.abc import Callable
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import astuple


class RunsQueued(Struct, frozen=True):
    """There are runs that can be claimed."""

    kind: ClassVar[str] = "queued"


class CancelRequested(Struct, frozen=True):
    """A client has cancelled the response."""

    kind: ClassVar[str] = "cancelled"
    response_id: str


class EventsAppended(Struct, frozen=True):
    """The log of the response reaches the event with the number `last`."""

    kind: ClassVar[str] = "events"
    response_id: str
    last: int


class ResponseSaved(Struct, frozen=True):
    """The response was saved without new events."""

    kind: ClassVar[str] = "events"
    response_id: str


class ResponseDeleted(Struct, frozen=True):
    """The response was deleted."""

    kind: ClassVar[str] = "deleted"
    response_id: str


class ResponseFollowed(Struct, frozen=True):
    """A process has readers of the response."""

    kind: ClassVar[str] = "follow"
    response_id: str


class AttemptBegun(Struct, frozen=True):
    """A process works on the response, which may have readers elsewhere."""

    kind: ClassVar[str] = "begun"
    response_id: str


class OwnerDied(Struct, frozen=True):
    """A process that worked on runs under this name has died."""

    owner: str


class ReportsLost(Struct, frozen=True):
    """Earlier announcements may be lost."""


Announcement = (
    RunsQueued | CancelRequested | EventsAppended | ResponseSaved | ResponseDeleted | ResponseFollowed | AttemptBegun
)
Announce = Callable[[Announcement], None]

Change = Announcement | OwnerDied | ReportsLost
OnChange = Callable[[Change], None]

_WITH_ID: dict[str, Callable[[str], Announcement]] = {
    each.kind: each for each in (CancelRequested, ResponseSaved, ResponseDeleted, ResponseFollowed, AttemptBegun)
}


def encode_announcement(announcement: Announcement) -> str:
    """Return the kind and the fields, separated by spaces.

    Nodes of different versions exchange this text during an upgrade, so it must not change.
    """
    return " ".join((announcement.kind, *map(str, astuple(announcement))))


def decode_announcement(text: str) -> Announcement | None:
    """Return the announcement of a process, or None for a kind that this version does not have."""
    kind, _, rest = text.partition(" ")
    if kind == RunsQueued.kind:
        return RunsQueued()
    if kind == EventsAppended.kind:
        response_id, _, number = rest.rpartition(" ")
        if response_id and number.isdecimal():
            return EventsAppended(response_id, int(number))
    return _WITH_ID[kind](rest) if kind in _WITH_ID else None
