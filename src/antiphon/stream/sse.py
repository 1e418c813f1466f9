"""Server-sent events, both ways: events to bytes, and bytes as they come off a socket to messages."""

import re
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from antiphon.errors import ModelError
from antiphon.protocol.codec import EVENTS, encode
from antiphon.protocol.events import Event
from antiphon.protocol.unions import Unknown

DONE = b"data: [DONE]\n\n"
"""What follows the last event."""

MESSAGE_LIMIT = 16 * 1024 * 1024
"""More than any event needs: the largest carry a picture."""


# What stands before an event's JSON.
_PREFIXES: dict[type[Any], bytes] = {kind: f"event: {name}\ndata: ".encode() for name, kind in EVENTS.members.items()}
_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")


def encode_event(event: Event | Unknown) -> bytes:
    """One event, with its name in front."""
    prefix = _PREFIXES.get(type(event)) or _make_prefix(event)
    return prefix + encode_json_line(event) + b"\n\n"


def encode_batch(events: Iterable[Event | Unknown]) -> bytes:
    """Events that happened at once, for one write."""
    return b"".join([encode_event(event) for event in events])


def encode_json_line(event: Event | Unknown) -> bytes:
    """An event's JSON on one line. Something unknown inside it may have come with line ends of its own."""
    body = encode(event)
    if 10 in body or 13 in body:  # LF, CR: as numbers they are found ten times as fast
        # JSON has line ends between its tokens only, where a space means the same.
        return body.translate(_LINE_ENDS_TO_SPACES)
    return body


def _make_prefix(event: Event | Unknown) -> bytes:
    name = event.type
    # A name with a line end would forge lines of its own; the body still carries it.
    if not name or "\n" in name or "\r" in name:
        return b"data: "
    return f"event: {name}\ndata: ".encode()


class SseMessage(Struct, frozen=True, gc=False):
    """One message of a stream. `data` stays bytes: what reads it next is a JSON decoder, or looks for `[DONE]`."""

    event: str | None
    data: bytes


class SseDecoder:
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

    def feed(self, chunk: bytes) -> list[SseMessage]:
        """The messages that this chunk completes."""
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = chunk.split(b"\n")
        if lines and (self._line or self._first_line):
            lines[0] = self._end_line(lines[0])
        messages = self._read(lines)
        self._line += rest
        if self._size + len(self._line) > self._limit:
            raise self._too_large()
        return messages

    def close(self) -> list[SseMessage]:
        """The stream is over: a message that no empty line has ended yet counts too, so that nothing is lost."""
        return self._read([self._end_line(b""), b""])

    def _end_line(self, rest: bytes) -> bytes:
        line = bytes(self._line + rest)
        self._line.clear()
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        return line

    def _read(self, lines: list[bytes]) -> list[SseMessage]:
        messages: list[SseMessage] = []
        for line in lines:
            if line:
                self._read_field(line)
                continue
            if self._data:
                messages.append(SseMessage(self._event, b"\n".join(self._data)))
                self._data.clear()
                self._size = 0
            self._event = None
        return messages

    def _read_field(self, line: bytes) -> None:
        size = self._size + len(line)
        if size > self._limit:
            raise self._too_large()
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size = size
        elif field == b"event":
            self._event = value.removeprefix(b" ").decode(errors="replace") or None

    def _too_large(self) -> ModelError:
        return ModelError(f"A message of the event stream is larger than {self._limit} bytes.")


_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# A backslash that is escaped comes first: what follows it is no escape.
_ESCAPE = re.compile(
    rb"\\\\|" + _HIGH + _LOW + rb"|(?P<end>" + _HIGH + rb')(?=")|(?P<half>' + _HIGH + rb"|" + _LOW + rb")"
)
_UNKNOWN = rb"\ufffd"


class SurrogateRepairer:
    """Puts the halves together: the first waits for the message that begins with the second."""

    def __init__(self) -> None:
        self._waiting = b""

    def repair(self, data: bytes) -> bytes:
        """The JSON of a message, with whole characters alone."""
        if b"\\ud" not in data and b"\\uD" not in data:
            return data
        return _ESCAPE.sub(self._mend_escape, data)

    def _mend_escape(self, found: "re.Match[bytes]") -> bytes:
        if found["end"]:
            self._waiting = found["end"]
            return b""
        if not found["half"]:
            return found[0]
        first, self._waiting = self._waiting, b""
        if first and re.fullmatch(_LOW, found["half"]):
            return first + found["half"]
        return _UNKNOWN
