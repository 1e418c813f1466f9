"""Encode events as server-sent events, and decode a byte stream of them."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Raw, Struct

from antiphon.errors import UpstreamError
from antiphon.protocol import events
from antiphon.protocol.codec import EVENTS, encode, reuse_tools_json
from antiphon.protocol.events import Event
from antiphon.protocol.tool_lists import SharedTools
from antiphon.protocol.unions import Unknown, copy_struct
from antiphon.stream.limits import ANSWER_TOO_LARGE

DONE = b"data: [DONE]\n\n"
"""Sent after the last event."""

MESSAGE_LIMIT = 16 * 1024 * 1024
"""Default size limit of a decoded message in bytes. The largest events contain an image."""

# The bytes before an event's JSON, by event type.
_PREFIXES: dict[type[Any], bytes] = {kind: f"event: {name}\ndata: ".encode() for name, kind in EVENTS.members.items()}
# The same for events of text and numbers only: their JSON has no line ends.
_TEXT_EVENT_PREFIXES: dict[type[Any], bytes] = {
    kind: _PREFIXES[kind]
    for kind in (
        events.OutputTextDelta,
        events.RefusalDelta,
        events.ReasoningTextDelta,
        events.ReasoningDelta,
        events.ReasoningSummaryTextDelta,
        events.FunctionCallArgumentsDelta,
        events.CustomToolCallInputDelta,
    )
}
_LIFECYCLE_EVENTS = frozenset(events.Lifecycle.__subclasses__())
# Bytes as integers: searching for one is five times as fast as for bytes of length 1.
_LF, _CR, _BACKSLASH = 10, 13, 92
_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")

_HIGH_SURROGATE = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW_SURROGATE = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# An escaped backslash is matched first: the characters after it are not an escape.
_ESCAPE = re.compile(
    rb'\\\\|%b%b|(?P<open>%b)(?=")|(?P<lone>%b|%b)'
    % (_HIGH_SURROGATE, _LOW_SURROGATE, _HIGH_SURROGATE, _HIGH_SURROGATE, _LOW_SURROGATE)
)
_REPLACEMENT = rb"\ufffd"


def encode_event(event: Event | Unknown) -> bytes:
    """Encode one event, with its `event:` and `data:` lines."""
    prefix = _PREFIXES.get(type(event)) or _encode_prefix(event)
    return prefix + encode_json_line(event) + b"\n\n"


def encode_batch(batch: Iterable[Event | Unknown]) -> bytes:
    """Encode several events for one write."""
    encoded: list[bytes] = []
    for event in batch:
        prefix = _TEXT_EVENT_PREFIXES.get(type(event))
        if prefix is None:
            encoded.append(encode_event(event))
        else:
            encoded += (prefix, encode(event), b"\n\n")
    return b"".join(encoded)


def encode_start(batch: Sequence[Event | Unknown]) -> bytes:
    """Encode the first events of a response. They repeat the same response, which is encoded once."""
    response = getattr(batch[0], "response", None)
    if response is None or any(getattr(event, "response", None) is not response for event in batch):
        return encode_batch(batch)
    shared = Raw(_remove_line_ends(encode(reuse_tools_json(response))))
    encoded: list[bytes] = []
    for event in batch:
        encoded += (_PREFIXES[type(event)], encode(_replace_response(event, shared)), b"\n\n")
    return b"".join(encoded)


def encode_json_line(event: Event | Unknown) -> bytes:
    """Encode an event as JSON on one line. An `Unknown` inside it may contain line ends."""
    if type(event) in _LIFECYCLE_EVENTS and type(event.response.tools) is SharedTools:  # type: ignore[union-attr]
        event = _replace_response(event, reuse_tools_json(event.response))  # type: ignore[union-attr]
    return _remove_line_ends(encode(event))


def _remove_line_ends(body: bytes) -> bytes:
    """Return JSON on one line. It has line ends only between tokens, and a space is equivalent there."""
    return body.translate(_LINE_ENDS_TO_SPACES) if _LF in body or _CR in body else body


def _replace_response(event: Any, response: Any) -> Any:
    copied = copy_struct(event)
    copied.response = response
    return copied


def _encode_prefix(event: Event | Unknown) -> bytes:
    name = event.type
    # A type with a line end would add lines to the message. The JSON still contains it.
    if not name or "\n" in name or "\r" in name:
        return b"data: "
    return f"event: {name}\ndata: ".encode()


class SseMessage(Struct, frozen=True, gc=False):
    """One message of an event stream. `data` is left as bytes for the JSON decoder."""

    event: str | None
    data: bytes


class SseDecoder:
    """An incremental decoder of an event stream. Chunks may be split anywhere.

    Lines may end in LF, CRLF or CR. A message larger than `limit` bytes raises UpstreamError; the decoder cannot
    be used after that.
    """

    def __init__(self, *, limit: int = MESSAGE_LIMIT) -> None:
        self._limit = limit
        self._line = bytearray()  # the unfinished last line
        self._first_line = True
        self._after_cr = False  # the last chunk ended in a CR: an LF may follow
        self._event: str | None = None
        self._data: list[bytes] = []
        self._size = 0  # in bytes, of the data lines so far
        self._is_between_messages = True  # no part of a message has been received yet

    def feed(self, chunk: bytes) -> list[SseMessage]:
        """Return the messages that this chunk completes."""
        lines = self.split_data(chunk)
        if lines is not None:
            return [SseMessage(None, line) for line in lines]
        # The same with the names of events.
        if chunk[:7] == b"event: " and self._has_whole_messages(chunk):
            messages = _split_named_messages(chunk[7:-2])
            if messages is not None:
                self._first_line = False
                return messages
        return self._feed_lines(chunk)

    def split_data(self, chunk: bytes) -> list[bytes] | None:
        """Return the data of a chunk that is whole messages of one data line each, the most frequent case.

        None: nothing was read, and `feed` must read the chunk.
        """
        if chunk[:6] != b"data: " or not self._has_whole_messages(chunk):
            return None
        data = chunk[6:-2]
        lines = [data]
        if _LF in data:
            lines = data.split(b"\n\ndata: ")
            if _LF in b"".join(lines):  # there are other line ends
                return None
        self._first_line = False
        return lines

    def _has_whole_messages(self, chunk: bytes) -> bool:
        return self._is_between_messages and chunk[-2:] == b"\n\n" and _CR not in chunk and len(chunk) <= self._limit

    def _feed_lines(self, chunk: bytes) -> list[SseMessage]:
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if _CR in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = chunk.split(b"\n")
        if lines and (self._line or self._first_line):
            lines[0] = self._complete_line(lines[0])
        messages = self._read(lines)
        self._line += rest
        if self._size + len(self._line) > self._limit:
            raise self._make_size_error()
        self._is_between_messages = not (
            self._line or self._first_line or self._after_cr or self._data or self._event is not None
        )
        return messages

    def close(self) -> list[SseMessage]:
        """Return the last message at the end of the stream, even if no empty line ends it."""
        return self._read([self._complete_line(b""), b""])

    def _complete_line(self, rest: bytes) -> bytes:
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
            raise self._make_size_error()
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size = size
        elif field == b"event":
            self._event = value.removeprefix(b" ").decode(errors="replace") or None
        elif field == b"error":  # llama.cpp's form of an error event
            self._event = "error"
            self._data.append(value.removeprefix(b" "))
            self._size = size

    def _make_size_error(self) -> UpstreamError:
        message = f"A message of the event stream is larger than {self._limit} bytes."
        return UpstreamError(message, code=ANSWER_TOO_LARGE)


def _split_named_messages(text: bytes) -> list[SseMessage] | None:
    """Return messages of an event line and a data line, without the first `event: `; None if one has other lines."""
    messages: list[SseMessage] = []
    for message in text.split(b"\n\nevent: "):
        name, _, data = message.partition(b"\ndata: ")
        if not data or _LF in name or _LF in data:
            return None
        messages.append(SseMessage(name.decode(errors="replace") or None, data))
    return messages


class SurrogateRepairer:
    """Repairs characters that an upstream split into two surrogate escapes in consecutive messages.

    A high surrogate at the end of a string is held until the next message with a low one. Other lone surrogates, which
    no JSON decoder accepts, become U+FFFD.
    """

    def __init__(self) -> None:
        self._held = b""

    def repair(self, data: bytes) -> bytes:
        """Return the JSON of a message without lone surrogates."""
        if _BACKSLASH not in data or (b"\\ud" not in data and b"\\uD" not in data):
            return data
        return _ESCAPE.sub(self._replace_escape, data)

    def _replace_escape(self, found: "re.Match[bytes]") -> bytes:
        if found["open"]:
            self._held = found["open"]
            return b""
        if not found["lone"]:
            return found[0]
        high, self._held = self._held, b""
        if high and re.fullmatch(_LOW_SURROGATE, found["lone"]):
            return high + found["lone"]
        return _REPLACEMENT
