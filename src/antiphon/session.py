"""The protocol of a session: a chat that several runs continue, even in several processes.

The agent uses this protocol and the stores implement it. Neither imports the other. One run at a time holds a session.
It reads the items of the earlier runs when it starts, and stores its own items when it ends.
"""

import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from antiphon.callbacks import call_callback
from antiphon.errors import AntiphonError, ConfigError, InvalidRequest, ServerError
from antiphon.ledger import Lease, Leases
from antiphon.protocol.json_text import JsonObject

WAIT_SECONDS = 60.0
"""The time for which a run waits until another run has released the session."""

Trim: TypeAlias = Callable[[list[JsonObject]], Sequence[JsonObject] | Awaitable[Sequence[JsonObject]]]
"""Selects the items that the next run reads. The session still has all of them."""


class SessionBusy(AntiphonError):
    """Another run holds the session. Nothing was changed."""

    status = 409
    type = "invalid_request_error"
    default_code = "session_busy"

    def __init__(self, session_id: str, seconds: float) -> None:
        super().__init__(
            f"The session '{session_id}' is in use by another run. It was not released within {seconds:g} seconds.",
            param="session",
        )
        self.session_id = session_id


class SessionFailed(ServerError):
    """The items of a run that has ended cannot be stored in its session. `outcome` is the outcome of the run."""

    default_code = "session_failed"

    def __init__(self, session_id: str, reason: str, outcome: Any) -> None:
        super().__init__(f"The items of the run cannot be stored in the session '{session_id}': {reason}")
        self.session_id = session_id
        self.outcome = outcome


@runtime_checkable
class Session(Leases, Protocol):
    """A chat of one or more runs, as a list of items.

    The methods of `Leases` take `session_id` as the id. With `appends_only`, the items of a run cannot be replaced: it
    stores them only when it has ended with an answer.
    """

    @property
    def session_id(self) -> str: ...

    @property
    def wait_seconds(self) -> float: ...

    @property
    def appends_only(self) -> bool: ...

    async def load(self) -> list[JsonObject]:
        """Return the items that the next run reads: all items, or a selection of them."""

    async def save_run(self, run_id: str, items: Sequence[JsonObject]) -> None:
        """Store the items of a run after those of other runs. They replace its items, unless `appends_only`."""

    async def list_items(self, *, limit: int | None = None) -> list[JsonObject]:
        """Return all items in order, or the last ones."""

    async def add_items(self, items: Sequence[JsonObject]) -> None:
        """Add items, for example of a chat from elsewhere."""

    async def pop_item(self) -> JsonObject | None:
        """Remove the last item and return it. None if there is no item."""

    async def clear(self) -> None:
        """Remove all items."""

    async def close(self) -> None:
        """Release the file or the connections."""


class LocalLeases:
    """The lease of a session in this process, for any number of event loops and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = ""
        self._ends_at = 0.0

    async def hold(self, run_id: str, owner: str, seconds: float, *, instead_of: str = "") -> bool:
        with self._lock:
            if self._owner not in ("", owner, instead_of):
                return False
            self._owner, self._ends_at = owner, time.monotonic() + seconds
            return True

    async def release(self, run_id: str, owner: str) -> None:
        with self._lock:
            if self._owner == owner:
                self._owner = ""

    async def find_lease(self, run_id: str) -> Lease | None:
        with self._lock:
            return Lease(self._owner, self._ends_at - time.monotonic(), 0.0)


def check_items(items: Any) -> Sequence[JsonObject]:
    """Return items that a program adds to a session. Raises InvalidRequest for anything else: no run could read it."""
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise InvalidRequest(f"items: expected a list of items, got {type(items).__name__}.", param="items")
    checked = list(items)
    for index, item in enumerate(checked):
        if not isinstance(item, dict):
            raise InvalidRequest(
                f"items[{index}]: expected an item as a dictionary, got {type(item).__name__}.", param=f"items[{index}]"
            )
    return checked


def check_trim(trim: Trim | None) -> Trim | None:
    """Return the trim function of a session. Raises ConfigError if it is not a function."""
    if trim is not None and not callable(trim):
        raise ConfigError(f"trim: expected a function such as last_turns(20), got {type(trim).__name__}.")
    return trim


async def apply_trim(trim: Trim | None, items: list[JsonObject]) -> list[JsonObject]:
    """Return the items that a trim function selects. Raises InvalidRequest if it returns something else than items."""
    if trim is None:
        return items
    selected: Any = await call_callback(trim, items)
    if not isinstance(selected, Sequence) or not all(isinstance(item, dict) for item in selected):
        raise InvalidRequest("The trim function of the session must return a list of items.", param="session")
    return list(selected)


def last_turns(count: int) -> Trim:
    """Return a trim function that selects the last messages of the user with all items after them.

    System and developer messages before them are selected too.
    """
    if count < 1:
        raise InvalidRequest("The number of turns must be at least 1.", param="count")

    def trim(items: list[JsonObject]) -> list[JsonObject]:
        starts = [index for index, item in enumerate(items) if item.get("role") == "user"]
        if len(starts) <= count:
            return items
        first = starts[-count]
        return [*(item for item in items[:first] if item.get("role") in ("system", "developer")), *items[first:]]

    return trim
