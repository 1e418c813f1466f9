"""The connections of an SQL store, as its shared parts use them."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol


class WorkQueue(Protocol):
    def submit(self, work: Any, parameters: Sequence[object], /) -> Awaitable[Any]:
        """Execute a statement, or a function of the connection and the parameters, and return its result."""


class SqlDatabase:
    """Base of the parts that the SQL stores share. Each store has its own statements for them."""

    _now: Callable[[], float]

    @property
    @abstractmethod
    def _reader(self) -> WorkQueue: ...

    @property
    @abstractmethod
    def _writer(self) -> WorkQueue: ...
