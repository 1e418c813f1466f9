"""The protocol of a ledger: numbered entries of agent runs, written so that another process can resume a run.

A ledger stores bytes and does not interpret them. A run has at most one owner, which renews its lease while it works.
Each number of a run can be written only once, and only by the owner, so if two processes execute the same run, only one
of them makes progress. The agent uses this protocol and the stores implement it. Neither imports the other.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from antiphon.errors import AntiphonError, ServerError

T = TypeVar("T")

# The run of a subagent has the idempotency key of its call as its id: see `Journal.make_key`.
_SUBAGENT_RUN = re.compile(r"(.+?)(?::\d+:\d+)+")


class RunTaken(AntiphonError):
    """Another process executes this run, or has taken it over. Nothing was written."""

    status = 409
    type = "invalid_request_error"
    default_code = "run_taken"

    def __init__(self, run_id: str, message: str = "") -> None:
        super().__init__(message or f"Another process has continued the run '{run_id}'.", param="run_id")
        self.run_id = run_id


class LedgerFailed(ServerError):
    """The entries of a subagent's run cannot be read or written. The whole run stops and can be resumed."""


class Lease(Struct, frozen=True):
    """The lease of a run. `owner` is "" if nobody has it.

    `seconds_left` is the time until it ends, negative if it has ended. `idle_seconds` is the time since the last entry
    or renewal. Both are measured by the clock of the ledger.
    """

    owner: str
    seconds_left: float
    idle_seconds: float


class Holder(Struct, frozen=True):
    """The owner of a run, as a condition of a write. The run of a subagent belongs to the owner of the first run."""

    run_id: str
    owner: str


class RunSummary(Struct, frozen=True, kw_only=True):
    """A run in a list. `status` is from the last entry that gave one. Times are in seconds.

    `lease` is None if the run has no owner.
    """

    run_id: str
    created_at: int
    updated_at: int
    status: str
    title: str
    lease: Lease | None = None


def make_summary(row: Sequence[Any]) -> RunSummary:
    """Return a run from a row: the fields of the run, and then those of its lease."""
    run_id, created_at, updated_at, status, title, *lease = row
    return RunSummary(
        run_id=run_id,
        created_at=created_at,
        updated_at=updated_at,
        status=status,
        title=title,
        lease=Lease(*lease) if lease[0] else None,
    )


class Leases(Protocol):
    """Leases by id: of the runs of a ledger, or of a session."""

    async def hold(self, run_id: str, owner: str, seconds: float, *, instead_of: str = "") -> bool:
        """Take or renew the lease of a run that has an entry.

        Return False and change nothing if the owner is neither `owner` nor `instead_of`.
        """

    async def release(self, run_id: str, owner: str) -> None:
        """End the lease if this is the owner."""

    async def find_lease(self, run_id: str) -> Lease | None:
        """Return the lease of a run, even if it has no owner. None for an unknown run."""


class Ledger(Leases, Protocol):
    """Storage for the entries of agent runs. An entry is on disk when `append` returns."""

    async def append(
        self,
        run_id: str,
        number: int,
        entry: bytes,
        *,
        status: str | None = None,
        title: str = "",
        holder: Holder | None = None,
    ) -> None:
        """Write the entry of this number. Raises RunTaken if it exists, or if `holder` is not the owner of its run.

        Cancellation does not interrupt the write. A caller that is cancelled meanwhile gets CancelledError at its next
        await, when the entry is written.
        """

    async def read(self, run_id: str) -> Sequence[bytes]:
        """Return the entries of a run in order. An unknown run has none."""

    async def runs(self, *, limit: int = 100) -> Sequence[RunSummary]:
        """Return the runs, newest first."""

    async def delete(self, run_id: str, *, owner: str = "") -> bool:
        """Delete the entries of a run, and of the runs of its subagents.

        Return False and change nothing if the run is unknown, or if its owner is another one than `owner`. The former
        owner cannot write any more entries.
        """

    async def close(self) -> None:
        """Close the file."""


def find_first_run(run_id: str) -> str | None:
    """Return the id of the run to which the run of a subagent belongs; None if this is not the id of such a run."""
    match = _SUBAGENT_RUN.fullmatch(run_id)
    return None if match is None else match[1]


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
    if cancellations:
        repeat_cancellation()
    return work.result()


def repeat_cancellation() -> None:
    """Let the next await of the current task raise, after CancelledError was caught. The number of requests stays."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
        task.cancel()
