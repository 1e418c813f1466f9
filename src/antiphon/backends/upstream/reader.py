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

    A reader may also say that an answer is `concluded`: whole, though not `finished`, since its server may have more to
    tell about it. Then it is not waited for as long as for words.
    """

    finished: bool

    def read(self, message: Message) -> Sequence[Delta]:
        """What this message says."""

    def end(self) -> Sequence[Delta]:
        """What is left to say when the stream is over, whether or not the server has said that it is.

        If the answer is not complete, the reader stays unfinished: the stream has broken off then. A stream that does
        break off is over too, and an answer that was complete by then is not lost for it.
        """
