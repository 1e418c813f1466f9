"""Operations of a store that wait for its writer or reader, and the check that the writer still works."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from antiphon.errors import StoreUnavailable

# Time for which the result of a check is reused, and maximum time to wait for a check.
CHECK_SECONDS = 1.0
CHECK_TIMEOUT_SECONDS = 5.0


class QueuedOperation:
    """Work for a connection. `outcome` is its result, or the exception that it raised."""

    __slots__ = ("outcome", "parameters", "waiter", "work")

    def __init__(self, work: Any, parameters: Sequence[object], waiter: asyncio.Future[Any]) -> None:
        self.work = work
        self.parameters = parameters
        self.waiter = waiter
        self.outcome: object = None


def resolve_waiters(batch: Sequence[QueuedOperation], describe: Callable[[Exception], Exception]) -> None:
    """Give each caller its outcome. `describe` returns the error that a client gets for an exception."""
    for operation in batch:
        if operation.waiter.done():  # cancelled by the caller
            continue
        outcome = operation.outcome
        if isinstance(outcome, StoreUnavailable):
            # Each waiter gets an exception of its own, because one error can be the outcome of many operations.
            operation.waiter.set_exception(type(outcome)(outcome.message, retry_after=outcome.retry_after))
        elif isinstance(outcome, Exception):
            operation.waiter.set_exception(describe(outcome))
        else:
            operation.waiter.set_result(outcome)


class WriterCheck:
    """A check that the writer of a store works. Callers share its result for a second."""

    def __init__(self) -> None:
        self._running: asyncio.Future[Any] | None = None
        self._started_at = 0.0

    async def run(self, start: Callable[[], asyncio.Future[Any]], failure: StoreUnavailable | None) -> None:
        """Wait for the check that `start` begins, or for a recent one. Raises StoreUnavailable.

        `failure` is the error of the last write. A check that succeeded before that error is not reused.
        """
        check = self._running
        if check is None or (check.done() and not self._is_recent(check, failure)):
            check = self._running = start()
            check.add_done_callback(_retrieve_error)
            self._started_at = time.monotonic()
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_SECONDS):
                await asyncio.shield(check)
        except TimeoutError:
            raise StoreUnavailable("The store does not respond.") from None

    def _is_recent(self, check: asyncio.Future[Any], failure: StoreUnavailable | None) -> bool:
        has_failed_since = failure is not None and check.exception() is None
        return time.monotonic() - self._started_at < CHECK_SECONDS and not has_failed_since


def _retrieve_error(check: asyncio.Future[Any]) -> None:
    """Mark the error as retrieved. The caller may have been cancelled."""
    if not check.cancelled():
        check.exception()
