"""Operations of several statements that SQLite and PostgreSQL execute alike.

An operation is a generator. It yields steps, and gets the rows of each as a list. Statements have `?` for parameters.
`IN TEXTS(?)` and `IN NUMBERS(?)` compare with the elements of a list. A statement that changes rows returns one row for
each of them if it ends in `RETURNING`.

In PostgreSQL several operations share a transaction without savepoints. So an operation raises AntiphonError only
before it has changed anything.
"""

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class SqlStep(NamedTuple):
    """One statement."""

    statement: str
    parameters: Sequence[object] = ()


class Batch(NamedTuple):
    """One statement, executed for several rows of parameters. It returns no rows."""

    statement: str
    rows: Sequence[Sequence[object]]


class SqliteStep(NamedTuple):
    """A statement that only SQLite executes. It returns no rows."""

    statement: str
    parameters: Sequence[object] = ()


class Lock(NamedTuple):
    """A lock until the end of the transaction. It has no effect in SQLite, which has one writer at a time."""

    key: str


class Clock(NamedTuple):
    """A row with the present time: that of the database if several machines share it."""


AnyStep = SqlStep | Batch | SqliteStep | Lock | Clock
Steps = Generator[AnyStep, list[Any], Result]


class StepDatabase:
    """Base of the parts of a database that are written as steps."""

    _now: Callable[[], float]

    @abstractmethod
    async def _read(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        """Execute steps that change nothing."""

    @abstractmethod
    async def _write(self, work: Callable[..., Steps[Result]], *parameters: object) -> Result:
        """Execute steps in a transaction."""

    async def _fetch(self, statement: str, parameters: Sequence[object]) -> list[Any]:
        """Return the rows of a query."""
        return await self._read(_run_one, statement, parameters)

    async def _execute(self, statement: str, parameters: Sequence[object]) -> list[Any]:
        """Execute one statement that changes rows, and return its rows."""
        return await self._write(_run_one, statement, parameters)


def _run_one(statement: str, parameters: Sequence[object]) -> Steps[list[Any]]:
    return (yield SqlStep(statement, parameters))
