"""What the memory store remembers: the tables of a database, as dictionaries.

No method of the store waits for anything, so each is a transaction of its own: it checks first, and then changes.
"""

import itertools
import secrets
import time
from collections.abc import Callable, Iterator

import msgspec

from antiphon.errors import Unavailable
from antiphon.store.record import Batch, ItemRecord, Record

Key = tuple[str, str]  # the project, and the id of a response, conversation or prompt


class ConversationRow(msgspec.Struct, kw_only=True):
    """A conversation. Its items are found by their place in the order of all items, and this by their id.

    `deleted` has the places of items that are gone, `blocks` the places where responses were added, by their ids.
    """

    created_at: int
    metadata: bytes
    expires_at: int | None
    items: dict[int, ItemRecord] = {}
    places: dict[str, int] = {}
    deleted: dict[str, int] = {}
    blocks: dict[str, int] = {}


class RunRow(msgspec.Struct, kw_only=True):
    request: bytes
    model: str
    free_since: float
    owner: str | None = None
    leased_until: float = 0.0
    lease: float = 0.0
    attempt: int = 0
    interruptions: int = 0
    watched: bool = False
    cancelled: bool = False


class PromptRow(msgspec.Struct, kw_only=True):
    body: bytes
    created_at: int


class Tables(msgspec.Struct):
    """Events are kept in batches, a prompt's versions in their order.

    `foreign` has, by response, the ids of the items that were not made in it. `run_starts` has the times at which runs
    began in the last minute.
    """

    responses: dict[Key, Record] = {}
    conversations: dict[Key, ConversationRow] = {}
    foreign: dict[Key, frozenset[str]] = {}
    events: dict[Key, list[Batch]] = {}
    runs: dict[Key, RunRow] = {}
    run_starts: list[float] = []
    prompts: dict[Key, dict[str, PromptRow]] = {}
    places: Iterator[int] = msgspec.field(default_factory=itertools.count)


class Memory:
    """The base of the store's parts. `now` tells what has expired."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.home = secrets.token_hex(16)
        self._kept: Tables | None = None

    async def open(self) -> None:
        self._kept = Tables()

    async def close(self) -> None:
        self._kept = None

    @property
    def _tables(self) -> Tables:
        if self._kept is None:
            raise Unavailable("The store is not open.")
        return self._kept

    def _is_live(self, row: Record | ConversationRow) -> bool:
        return row.expires_at is None or row.expires_at > self._now()

    def _holds(self, key: Key, owner: str) -> bool:
        run = self._tables.runs.get(key)
        return run is not None and run.owner == owner
