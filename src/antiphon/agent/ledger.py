"""Where a run writes down what it is about to do and what it has done, so that another process can go on with it.

A ledger keeps numbered entries for each run and nothing else; what is in them is the loop's business. A number can be
taken only once, so of two processes that go on with the same run only one gets anywhere.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class EntryTaken(Exception):
    """Somebody else has written this entry: the run is theirs now."""


class RunSummary(Struct, frozen=True, kw_only=True):
    """A run as a list shows it. `status` is what the last entry that named one said."""

    run_id: str
    created_at: int
    updated_at: int
    status: str
    title: str


class Ledger(Protocol):
    """Entries are on disk when `append` returns."""

    async def append(
        self, run_id: str, number: int, entry: bytes, *, status: str | None = None, title: str = ""
    ) -> None:
        """Write the entry of this number. Raises EntryTaken if there is one."""

    async def read(self, run_id: str) -> Sequence[bytes]:
        """The entries of a run in order; none if there is no such run."""

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        """The runs, the newest first."""

    async def close(self) -> None:
        """Release the file."""
