"""The report of a store about its writes, for metrics."""

from collections.abc import Callable, Iterable

from antiphon.errors import AntiphonError, StoreUnavailable

OnWrite = Callable[[float, int], object]
"""Called after each batch of writes, with its duration in seconds and the number of writes that the storage failed.

The store calls it in the thread that writes, and never in two threads at a time.
"""


def count_failures(outcomes: Iterable[object]) -> int:
    """Return the number of failures of the storage. A write that was refused, such as one without a lease, is none."""
    return sum(
        isinstance(outcome, Exception)
        and (isinstance(outcome, StoreUnavailable) or not isinstance(outcome, AntiphonError))
        for outcome in outcomes
    )
