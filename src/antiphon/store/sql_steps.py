"""Operations of several statements that SQLite and PostgreSQL execute alike.

An operation is a generator. It yields steps, and gets the rows of each as a list. Statements are written for both
databases:

- Parameters are `?`, or `?1`, `?2`, … if one is used several times. Times are whole seconds for columns of integers.
- `IN TEXTS(?)` and `IN NUMBERS(?)` compare with the elements of a list.
- `length(…)` of encoded JSON is its number of bytes.
- `NOW(?)` is the present time: the result of `_read_clock`.
- `greatest(…)` has no NULL among its arguments, for which the databases differ.
- `rowid` is the order of insertion of a response: the column `position` in PostgreSQL.
- Row locks (`FOR UPDATE SKIP LOCKED`, `FOR NO KEY UPDATE`, `FOR KEY SHARE`) are removed for SQLite, which has one
  writer at a time.
- A statement that changes rows returns one row for each of them if it ends in `RETURNING`.

A statement that cannot be the same is a `Variants`.

In PostgreSQL several operations share a transaction without savepoints. So an operation raises AntiphonError only
before it has changed anything.
"""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

from antiphon.errors import ServerError
from antiphon.store.changes import Announcement
from antiphon.store.limits import StoreLimits

Result = TypeVar("Result")


class Variants(NamedTuple):
    """A statement that differs between the databases. Parameters and rows are the same."""

    sqlite: str
    postgres: str


Statement = str | Variants


class SqlStep(NamedTuple):
    """One statement."""

    statement: Statement
    parameters: Sequence[object] = ()


class Batch(NamedTuple):
    """One statement, executed for several rows of parameters. It returns no rows."""

    statement: Statement
    rows: Sequence[Sequence[object]]


class SqliteStep(NamedTuple):
    """A statement that only SQLite executes. It returns no rows."""

    statement: str
    parameters: Sequence[object] = ()


class Lock(NamedTuple):
    """A lock until the end of the transaction. It has no effect in SQLite, which has one writer at a time."""

    key: str


class TryLock(NamedTuple):
    """A lock that is not waited for. Its row has False if another transaction has it."""

    key: str


class Clock(NamedTuple):
    """A row with the present time: that of the database if several machines share it."""


AnyStep = SqlStep | Batch | SqliteStep | Lock | TryLock | Clock
Steps = Generator[AnyStep, list[Any], Result]

# Maximum number of rows in one statement of SQLite. Each number of rows is a prepared statement of its own.
MAX_ROWS = 32


class RowInsert:
    """An INSERT statement for one row. The rows of several waiting operations are inserted at once.

    `into` is its beginning, up to the values of the rows, and `rest` the text after them. Executing it twice has the
    same effect as once. `after_repeat` follows a repetition if the first execution may have been committed. Its
    parameters are the first two columns.
    """

    def __init__(self, into: str, *, columns: int, rest: str = "", after_repeat: str | None = None) -> None:
        self.into, self.columns, self.after_repeat = into, columns, after_repeat
        row = f"({', '.join('?' * columns)})"
        self._statements = [f"{into} VALUES {', '.join([row] * count)} {rest}" for count in range(1, MAX_ROWS + 1)]
        self.one_row = self._statements[0]

    def for_rows(self, count: int) -> str:
        return self._statements[count - 1]


# Difference in seconds between the clocks of this process and of the database that has no effect on expiry.
MAX_CLOCK_OFFSET = 60.0


def limit_time(now: float, offset: float) -> int:
    """Return a time by the clock of this process, corrected if it is more than a minute ahead of the database's.

    `offset` is the number of seconds by which the database's clock is ahead. Everything that expires is deleted by the
    result: a node with a wrong clock must not delete the data of the others.
    """
    return int(now + offset) if offset < -MAX_CLOCK_OFFSET else int(now)


class WriteConflict(ServerError):
    """Two transactions waited for each other, and this one was rolled back."""


class StepDatabase:
    """Base of the parts of a database that are written as steps."""

    _now: Callable[[], float]
    _limits: StoreLimits

    @abstractmethod
    async def _read(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        """Execute steps that change nothing."""

    @abstractmethod
    async def _write(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        """Execute steps in a transaction."""

    @abstractmethod
    async def _write_apart(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        """Execute steps in a transaction that other writes do not wait for, if the database has several writers.

        Raises WriteConflict.
        """

    @abstractmethod
    async def _fetch(self, statement: Statement, parameters: Sequence[object]) -> list[Any]:
        """Return the rows of a query."""

    @abstractmethod
    def _change(self, statement: str, parameters: Sequence[object], *, is_idempotent: bool = False) -> Awaitable[int]:
        """Execute one statement, and return the number of changed rows.

        `is_idempotent`: executing it twice has the same effect and result as once.
        """

    @abstractmethod
    def _insert(self, insert: RowInsert, row: Sequence[object]) -> Awaitable[Any]:
        """Insert a row, together with those of other operations."""

    def _read_clock(self) -> float | None:
        """Return the parameter of `NOW(?)`. With None, the database uses its own clock."""
        return self._now()

    async def _measure_clock_offset(self) -> float:
        """Return the seconds by which the database's clock is ahead of ours. 0 if the database uses ours."""
        return 0.0

    async def _limit_time(self, now: float) -> int:
        """Return the time for deletions: see `limit_time`."""
        return limit_time(now, await self._measure_clock_offset())

    def _make_item_key(self, item_id: str) -> str:
        """Return the value of the columns `item_id` for an item."""
        return item_id

    def announce(self, announcement: Announcement) -> None:
        """Report a change to other processes, if the database can."""

    def _track_write(self, project: str, response_id: str, first: int) -> AbstractContextManager[bool]:
        """Return a context for a write of events. It has True if an earlier write of them may have been committed.

        `first` is the number of the first event, or -1 for a response without events.
        """
        return nullcontext(False)

    def _is_uncertain(self, project: str, response_id: str) -> bool:
        """Return True if an earlier save of a response without events may have been committed."""
        return False
