"""Where a run writes down what it is about to do and what it has done, so that another process can go on with it.

A ledger keeps numbered entries for each run and nothing else; what is in them is the loop's business. A number can be
taken only once, so of two processes that go on with the same run only one gets anywhere. This is the contract between
the agent, who writes, and the stores, who keep: neither of them knows the other.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class EntryTaken(Exception):
    """Somebody else has written this entry: the run is theirs now. Nothing was written.

    Not one of our errors: those end a run as failed, and this run goes on elsewhere.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(f"Another process has gone on with the run '{run_id}'.")


class RunSummary(Struct, frozen=True, kw_only=True):
    """A run as a list shows it. `status` is what the last entry that named one said; times are in seconds."""

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
        """Write the entry of this number. Raises EntryTaken if there is one.

        It is never left open whether it was written: who is cancelled in here hears of it after the entry is there,
        at the next wait.
        """

    async def read(self, run_id: str) -> Sequence[bytes]:
        """The entries of a run in order; none if there is no such run."""

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        """The runs, the newest first."""

    async def close(self) -> None:
        """Release the file."""
