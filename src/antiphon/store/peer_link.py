"""The interface to other processes that serve the same clients."""

from collections.abc import Awaitable, Callable
from typing import Protocol

AnswerQuestion = Callable[[bytes], Awaitable[bytes]]


class PeersUnresponsive(Exception):
    """A process that may have the answer to a question does not answer.

    `seconds` is the time since its last answer was due. If there are several such processes, it is the time of the last
    one that failed.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"Another process has not answered for {seconds:.1f} seconds.")
        self.seconds = seconds


class PeerLink(Protocol):
    """A connection to other processes. `answers` has the function that answers each kind of question."""

    answers: dict[str, AnswerQuestion]

    async def ask(self, kind: str, payload: bytes = b"") -> list[bytes]:
        """Return one or more answers that are not empty. Return none if no process has one.

        Raises PeersUnresponsive if none of those that answer has one, and others do not answer.
        """

    async def ask_all(self, kind: str, payload: bytes = b"") -> list[bytes]:
        """Return all answers that are not empty. A process that does not answer in time is left out."""


class StorePeerLink(PeerLink, Protocol):
    """A connection to the other processes with a store."""

    async def wait_connected(self) -> None:
        """Wait until questions can be asked."""
