"""What turns another server's event stream into deltas: one for each answer, and it does no IO."""

from collections.abc import Sequence
from typing import Protocol

from antiphon.stream.deltas import Delta
from antiphon.stream.sse import Message


class Reader(Protocol):
    """Reads one answer, message by message.

    It is `finished` once it has told `Finish` or `Failure`; whatever comes after that is not read. An error that the
    server puts into its stream is raised, as the error of ours that it is: before the first words, the request can then
    still be sent again or elsewhere. A server that does not stream answers with one JSON body, which comes as a single
    message without an event name.

    An answer is `concluded` if it is whole, though not `finished`: its server may have more to tell about it. That is
    not waited for as long as for words, and if the connection breaks or falls silent instead, nothing is lost.
    """

    finished: bool

    @property
    def concluded(self) -> bool:
        """Whether nothing but a farewell can be missing. Always false for a reader that cannot tell."""

    def read(self, message: Message) -> Sequence[Delta]:
        """What this message says."""

    def end(self) -> Sequence[Delta]:
        """What is left to say when the server has closed the stream, whether or not it has said that it is over.

        If the answer is not complete, the reader stays unfinished: the stream has broken off then. A connection that
        breaks or falls silent ends only an answer that is `concluded`.
        """
