"""The scheduler interface. `worker.Worker` implements it on the store's own queue."""

from collections.abc import Callable, Mapping
from typing import Protocol

from antiphon.engine.background.attempt import Attempt
from antiphon.engine.background.change_signal import ChangeSignal
from antiphon.store.base import RunKey


class Scheduler(Protocol):
    """Decides when and in which process a queued run begins.

    The store holds the queue, the leases and the events of a run. A scheduler claims runs in the store and works on
    them in this process. `worker.py` polls the store's own queue. A scheduler for several machines can take its
    decisions elsewhere and claim runs the same way.
    """

    owner: str
    """The name under which this process claims runs."""
    on_begin: Callable[[RunKey, Attempt], None] | None
    """Called when an attempt at a run begins in this process."""
    on_end: Callable[[RunKey], None] | None
    """Called when an attempt has ended, for any reason."""
    on_full: Callable[[], None] | None
    """Called if an announced run may wait, because this process works on as many runs as it may."""

    @property
    def attempts(self) -> Mapping[RunKey, Attempt]:
        """The attempts in progress in this process."""

    @property
    def changed(self) -> ChangeSignal:
        """The signal of changes of `attempts`."""

    async def start(self) -> None:
        """Begin to claim runs. Raises ConfigError if the scheduler cannot work."""

    async def close(self) -> None:
        """Stop all attempts and give their runs back to the queue."""

    def announce(self, key: RunKey) -> None:
        """Report a run that was just added to the store's queue."""

    def estimate_seconds(self, runs: int) -> float:
        """Return the estimated time until this number of runs has ended."""

    def wake(self) -> None:
        """Check the queue now instead of at the next interval."""

    def check_runs(self) -> None:
        """Check the queue now, and find runs that were cancelled or deleted: the reports may be lost."""

    def take_over(self, owner: str) -> None:
        """Claim the runs of a process that has died without waiting for the end of its leases."""

    def cancel(self, key: RunKey) -> None:
        """Cancel the attempt at this run in this process.

        Without such an attempt, the next check of the queue looks for cancellation requests in the store.
        """

    def stop(self, key: RunKey) -> None:
        """Stop the attempt at a run whose response was deleted."""
