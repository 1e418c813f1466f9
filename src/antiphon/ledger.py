"""The protocol of a ledger: numbered entries of agent runs, written so that another process can resume a run.

A ledger stores bytes and does not interpret them. Each number of a run can be written only once, so if two processes
resume the same run, only one of them makes progress. The agent uses this protocol and the stores implement it. Neither
imports the other.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

T = TypeVar("T")


class EntryTaken(Exception):
    """Another process has written this entry and continues the run. Nothing was written.

    It is no AntiphonError, because those end a run as failed, and this run continues elsewhere.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(f"Another process has continued the run '{run_id}'.")


class RunSummary(Struct, frozen=True, kw_only=True):
    """A run in a list. `status` is from the last entry that gave one. Times are in seconds."""

    run_id: str
    created_at: int
    updated_at: int
    status: str
    title: str


class Ledger(Protocol):
    """Storage for the entries of agent runs. An entry is on disk when `append` returns."""

    async def append(
        self, run_id: str, number: int, entry: bytes, *, status: str | None = None, title: str = ""
    ) -> None:
        """Write the entry of this number. Raises EntryTaken if it exists.

        Cancellation does not interrupt the write. A caller that is cancelled meanwhile gets CancelledError at its next
        await, when the entry is written.
        """

    async def read(self, run_id: str) -> Sequence[bytes]:
        """Return the entries of a run in order. An unknown run has none."""

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        """Return the runs, newest first."""

    async def close(self) -> None:
        """Close the file."""


async def defer_cancellation(work: asyncio.Future[T]) -> T:
    """Await work that must not be interrupted and return its result.

    Cancelling the current task, also repeatedly, does not stop the work. The next await of the task raises.
    """
    cancellations = 0
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancellations += 1
    task = asyncio.current_task()
    if cancellations and task is not None:
        # Request the cancellation again. uncancel() keeps the number of requests as it was.
        task.uncancel()
        task.cancel()
    return work.result()
