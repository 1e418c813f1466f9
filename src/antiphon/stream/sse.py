"""Server-sent events, both ways: events to bytes, and bytes as they come off a socket to messages."""

from collections.abc import Iterable

from msgspec import Struct

from antiphon.errors import ModelError
from antiphon.protocol.codec import encode
from antiphon.protocol.events import Event
from antiphon.protocol.open import Unknown

DONE = b"data: [DONE]\n\n"
"""What follows the last event."""

MESSAGE_LIMIT = 16 * 1024 * 1024
"""More than any event needs: the largest carry a picture."""


class _Prefixes(dict[type[Event], bytes]):
    """What stands before an event's JSON, by the event's class."""

    def __missing__(self, kind: type[Event]) -> bytes:
        prefix = self[kind] = f"event: {kind.__struct_config__.tag}\ndata: ".encode()
        return prefix


_PREFIXES = _Prefixes()
_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")


def encode_event(event: Event | Unknown) -> bytes:
    """One event, with its name in front."""
    if isinstance(event, Unknown):
        return _encode_unknown(event)
    return _PREFIXES[type(event)] + encode(event) + b"\n\n"


def encode_batch(events: Iterable[Event | Unknown]) -> bytes:
    """Events that happened at once, for one write."""
    return b"".join([encode_event(event) for event in events])


def _encode_unknown(event: Unknown) -> bytes:
    # JSON has line ends between its tokens only, where a space means the same and keeps the event on one line.
    body = event.raw.translate(_LINE_ENDS_TO_SPACES)
    name = event.type
    # A name with a line end would forge lines of its own; the body still carries it.
    if not name or "\n" in name or "\r" in name:
        return b"data: " + body + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


class Message(Struct, frozen=True, gc=False):
    """One message of a stream. `data` stays bytes: what reads it next is a JSON decoder, or looks for `[DONE]`."""

    event: str | None
    data: bytes


class Decoder:
    """Takes a stream in chunks cut anywhere and gives its messages as soon as they are complete.

    Lines may end in LF, CRLF or CR. A message that grows beyond `limit` bytes is a ModelError, and the stream of no use
    after that.
    """

    def __init__(self, *, limit: int = MESSAGE_LIMIT) -> None:
        self._limit = limit
        self._line = bytearray()  # the part of a line that has come so far
        self._first_line = True
        self._after_cr = False  # the last chunk ended in a CR, to which an LF may still belong
        self._event: str | None = None
        self._data: list[bytes] = []
        self._size = 0  # of the data lines so far, as they came

    def feed(self, chunk: bytes) -> list[Message]:
        """The messages that this chunk completes."""
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        head, *lines = chunk.split(b"\n")
        self._line += head
        if not lines:
            self._check_size(len(self._line))
            return []
        rest = lines.pop()
        messages: list[Message] = []
        self._read_line(self._take_line(), messages)
        for line in lines:
            self._read_line(line, messages)
        self._line += rest
        self._check_size(len(rest))
        return messages

    def close(self) -> list[Message]:
        """The stream is over: a message that no empty line has ended yet counts too, so that nothing is lost."""
        messages: list[Message] = []
        self._read_line(self._take_line(), messages)
        self._read_line(b"", messages)
        return messages

    def _take_line(self) -> bytes:
        line = bytes(self._line)
        self._line.clear()
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        return line

    def _read_line(self, line: bytes, messages: list[Message]) -> None:
        if not line:
            if self._data:
                messages.append(Message(self._event, b"\n".join(self._data)))
                self._data.clear()
                self._size = 0
            self._event = None
            return
        self._check_size(len(line))
        field, _, value = line.partition(b":")
        if field == b"data":
            self._size += len(line)
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._event = value.removeprefix(b" ").decode(errors="replace") or None

    def _check_size(self, line_length: int) -> None:
        if self._size + line_length > self._limit:
            raise ModelError(f"A message of the event stream is larger than {self._limit} bytes.")
