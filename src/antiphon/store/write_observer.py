"""The report of a store about its writes, for metrics."""

from collections.abc import Callable, Iterable

from antiphon.errors import AntiphonError, StoreUnavailable
from antiphon.store.operations import QueuedOperation

OnWrite = Callable[[float, int], object]
"""Called after each batch of writes, with its duration in seconds and the number of writes that the storage failed.

The store calls it in the thread that writes, and never in two threads at a time.
"""


def count_failures(batch: Iterable[QueuedOperation]) -> int:
    """Return the number of failures of the storage. A write that was refused, such as one without a lease, is none."""
    failures = 0
    for operation in batch:
        outcome = operation.outcome
        if isinstance(outcome, Exception):
            failures += isinstance(outcome, StoreUnavailable) or not isinstance(outcome, AntiphonError)
    return failures
