"""A SQLite file that is used from one thread of its own, for ledgers and sessions."""

import asyncio
import functools
import sqlite3
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from antiphon.errors import ServerError, Unavailable
from antiphon.ledger import defer_cancellation

_Result = TypeVar("_Result")


class SqliteThread:
    """A file that is opened on first use. `noun` is its name in messages, such as "ledger".

    It has its own thread, because tools can block all threads of the default executor. It can serve several event
    loops, one after the other.
    """

    def __init__(self, path: str | Path, *, noun: str) -> None:
        self._path = Path(path)
        self._noun = noun
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=noun)
        self._closed = False

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the connection, if there is one. Called in the thread."""

    async def close(self) -> None:
        if not self._closed:
            closing = self._submit(self._disconnect)
            self._closed = True
            await defer_cancellation(closing)
            self._thread.shutdown(wait=False)

    def _submit(self, work: Callable[..., _Result], *arguments: object) -> asyncio.Future[_Result]:
        if self._closed:
            raise Unavailable(f"The {self._noun} is closed.")
        call = functools.partial(self._call, work, *arguments)
        return asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _call(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        try:
            return work(*arguments)
        except sqlite3.Error as error:
            raise ServerError(f"The {self._noun} {self._path} failed: {error}") from error
