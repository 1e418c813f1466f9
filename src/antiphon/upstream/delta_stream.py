"""A streamed answer of an upstream: bytes from a connection to batches of deltas."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from antiphon.errors import AntiphonError, UpstreamError, UpstreamTimeout
from antiphon.offload import LARGE_BYTES, run_in_thread
from antiphon.protocol.json_text import JSON_ERRORS
from antiphon.stream.deltas import Delta
from antiphon.stream.limits import AnswerLimits
from antiphon.stream.sse import SseDecoder, SseMessage, SurrogateRepairer
from antiphon.upstream.error_mapping import (
    REFUSED,
    cut_message,
    describe_value,
    is_error_payload,
    make_broken_stream_error,
    map_error_payload,
    parse_error_body,
)
from antiphon.upstream.http import HttpResponse
from antiphon.upstream.redaction import redact

T = TypeVar("T")

ENVELOPE_SIZE = 256
"""Bytes of each event that do not count as content: names, ids and numbers around a few characters of text."""

MAX_JSON_VALUES = 2_000_000
"""Limit for the values in one JSON text. A value of three bytes takes up to a hundred in memory."""

FINAL_IDLE_TIMEOUT = 10.0
"""Idle timeout in seconds for a complete answer: the end marker arrives at once or never."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n" + _BYTE_ORDER_MARK
_BACKSLASH = 92
_BEFORE_EVENTS = b"\r\n" + _BYTE_ORDER_MARK  # stripped byte by byte: the mark may be split between chunks
_NO_SETTINGS = AnswerLimits()
# Errors of the JSON decoder. The data is the cause, not a defect of the reader.
_INVALID_DATA = (msgspec.MsgspecError, UnicodeDecodeError)
# Errors of a reader that gets data of an unexpected shape.
_READER_ERRORS = (msgspec.MsgspecError, RecursionError, LookupError, AttributeError, TypeError, ValueError)


class Reader(Protocol):
    """Reads one answer, message by message. Each attempt has a reader of its own.

    `finished` is true after the reader has returned `Finish` or `Failure`; later messages are not read. An error in the
    stream is raised as an `AntiphonError`: before the first delta, the request can then be retried or sent to another
    backend. A server that does not stream sends one JSON body, which arrives as a single message without an event name.

    `is_complete` is true when the answer is complete but not `finished`: the server may still send its usage or an end
    marker. The stream waits only briefly for these, and a broken connection is then not an error.
    """

    finished: bool

    @property
    def is_complete(self) -> bool:
        """True if only the usage or the end marker can be missing. False if the API gives no sign."""

    def read(self, message: SseMessage) -> Sequence[Delta]:
        """Return the deltas of a message."""

    def end(self) -> Sequence[Delta]:
        """Return the remaining deltas after the server has closed the stream, with or without an end marker.

        A reader of an incomplete answer stays unfinished, which makes the stream an error. After a broken or idle
        connection this is called only if `is_complete` is true.
        """


class PlainAnswerReader:
    """Base of a reader with short paths for answers that are text and nothing else."""

    def read_texts(self, data: Sequence[bytes]) -> tuple[list[Delta], int]:
        """Return the deltas of the messages up to the first that `read` must read, and the number of these messages."""
        return [], 0

    def read_plain_answer(self, body: bytes) -> Sequence[Delta]:
        """Return all deltas of such an answer, and finish. Return none for any other body, which `read` gets then.

        The body is UTF-8, but may be an error, or no JSON.
        """
        raise NotImplementedError


class DeltaStream:
    """Reads the body of a 2xx response: an event stream, or one JSON body from a server that does not stream.

    The first byte decides which, because some servers send a wrong content type.

    The answer fails if it exceeds `limits`, or if no delta arrives within the idle timeout. Comments, empty events and
    parts of an event do not count as progress.

    A thread reads a large message. Until it has, `take` returns None, and the reader belongs to the thread.
    """

    def __init__(
        self, response: HttpResponse, reader: Reader, *, secrets: Collection[str], limits: AnswerLimits = _NO_SETTINGS
    ) -> None:
        self.response = response
        self._reader = reader
        self._secrets = secrets
        self._limits = limits
        self._size = 0
        self._size_limit = limits.max_answer_bytes  # grows with the number of events
        self._event_count = 0
        self._quiet_since: float | None = None  # time of the first read without deltas since the last delta
        self._decoder: SseDecoder | None = None
        self._body = bytearray()  # of a response that is not an event stream
        self._repairer = SurrogateRepairer()
        self._text_reader = reader if isinstance(reader, PlainAnswerReader) else None
        # The error that followed the deltas of a read. It comes after them, however the network split the stream.
        self._failure: AntiphonError | None = None
        self._reading: asyncio.Task[Sequence[Delta] | AntiphonError] | None = None  # of a large message
        self._idle_timeout = math.inf
        self._is_shortened = False

    @property
    def finished(self) -> bool:
        return self._reading is None and self._reader.finished

    def set_idle_timeout(self, seconds: float) -> None:
        """End the answer with an error if no delta arrives for this long."""
        self._idle_timeout = min(seconds, FINAL_IDLE_TIMEOUT) if self._is_shortened else seconds
        self.response.set_idle_timeout(self._idle_timeout)

    def close(self) -> None:
        """Close the connection, or return it to the pool if the whole body was read."""
        self.response.close()

    async def read(self) -> Sequence[Delta]:
        """Return the deltas of the next read, possibly none. Raises if the answer ends unfinished."""
        while (deltas := self.take()) is None:
            await self.wait()
        return deltas

    def take(self) -> Sequence[Delta] | None:
        """Return the result of `read`, or None if it would have to `wait`."""
        self.check()
        if self._reading is not None:
            return self._take_large(self._reading)
        try:
            chunk = self.response.take()
        except UpstreamError:
            if not self._reader.is_complete:
                raise
            return self._finish([])
        if chunk is None:
            return None
        self._size += len(chunk)
        if self._size > self._size_limit:
            self._check_size()
        deltas = self._begin(chunk) if self._decoder is None else self._feed(self._decoder, chunk)
        if deltas or not chunk or self._reading is not None:
            self._quiet_since = None
            return deltas
        return self._check_progress()

    def wait(self) -> Awaitable[None]:
        """Wait until there is something to `take`."""
        return self.response.wait() if self._reading is None else _wait_for(self._reading)

    def check(self) -> None:
        """Raise the error that followed the deltas of the last read."""
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # its traceback refers to this stream

    def _check_size(self) -> None:
        self._size_limit = self._limits.max_answer_bytes + ENVELOPE_SIZE * self._event_count
        if self._size > self._size_limit:
            raise self._limits.make_error("max_answer_bytes")

    def _check_progress(self) -> Sequence[Delta]:
        """End an answer that has sent no delta for too long, although its connection is not idle."""
        now = asyncio.get_running_loop().time()
        if self._quiet_since is None:
            self._quiet_since = now
        elif now - self._quiet_since >= self._idle_timeout and not self._reader.finished:
            if not self._reader.is_complete:
                raise UpstreamTimeout("The upstream kept its answer open without sending any of it.")
            return self._finish([])
        return ()

    def _begin(self, chunk: bytes) -> Sequence[Delta]:
        """Read a chunk before it is known that the body is an event stream."""
        first = chunk.lstrip(_SPACE)[:1]
        if self._body or first in (b"{", b"[", b"<"):
            return self._collect(chunk)
        if chunk and not first:
            return ()  # some servers send white space as a keepalive
        self._decoder = SseDecoder()
        return self._feed(self._decoder, chunk.lstrip(_BEFORE_EVENTS))

    def _feed(self, decoder: SseDecoder, chunk: bytes) -> Sequence[Delta]:
        data = None if self._text_reader is None else decoder.split_data(chunk)
        if data is None:
            deltas = self._read_messages(decoder.feed(chunk) if chunk else decoder.close())
        else:
            deltas = self._read_data(chunk, data)
        if self._reading is not None:
            return deltas
        if chunk or self._reader.finished or self._failure is not None:
            self._shorten_idle_timeout()
            return deltas
        return self._finish(deltas)

    def _collect(self, chunk: bytes) -> Sequence[Delta]:
        """Collect a body that is not an event stream, and read it when it is complete."""
        self._body += chunk
        if chunk and not self.response.is_exhausted:
            return ()
        body = bytes(self._body)
        if body.lstrip(_SPACE)[:1] == b"<":
            raise self._make_web_page_error(body)
        return (
            self._read_json_body(body) if len(body) <= LARGE_BYTES else self._start_reading(self._read_json_body, body)
        )

    def _read_data(self, chunk: bytes, data: list[bytes]) -> list[Delta]:
        """Read messages without event names. Most of them are text, which the reader reads in one call."""
        if self._text_reader is None or len(chunk) > LARGE_BYTES or _has_surrogates(chunk):
            return self._read_messages([SseMessage(None, each) for each in data])
        if self._event_count + len(data) > self._limits.max_answer_events:
            raise self._limits.make_error("max_answer_events")
        deltas, count = self._text_reader.read_texts(data)
        self._event_count += count
        if count == len(data):
            return deltas
        return self._read_messages([SseMessage(None, each) for each in data[count:]], deltas)

    def _read_messages(self, messages: Sequence[SseMessage], deltas: list[Delta] | None = None) -> list[Delta]:
        """Return the deltas of these messages, after those of the messages before them; none if a thread reads them."""
        deltas = [] if deltas is None else deltas
        if not messages:
            return deltas
        # A large message takes many reads, so only the first one that a read completes can be large.
        if len(messages[0].data) > LARGE_BYTES:
            return self._start_reading(self._translate, messages, deltas)
        return self._translate(messages, deltas)

    def _start_reading(self, function: Callable[..., Sequence[Delta]], *arguments: Any) -> list[Delta]:
        """Read a large message in a thread. The next calls of `take` wait for its deltas."""
        self._reading = asyncio.create_task(run_in_thread(_catch_error, function, *arguments))
        return []

    def _take_large(self, reading: "asyncio.Task[Sequence[Delta] | AntiphonError]") -> Sequence[Delta] | None:
        if not reading.done():
            return None
        self._reading = self._quiet_since = None
        result = reading.result()
        if isinstance(result, AntiphonError):
            raise result
        self._shorten_idle_timeout()
        return result

    def _translate(self, messages: Sequence[SseMessage], deltas: list[Delta]) -> list[Delta]:
        reader = self._reader
        self._event_count += len(messages)
        if self._event_count > self._limits.max_answer_events:
            raise self._limits.make_error("max_answer_events")
        if len(messages[0].data) > MAX_JSON_VALUES:
            _check_value_count(messages[0].data)
        for each in messages:
            if reader.finished:
                break
            has_escape = _BACKSLASH in each.data
            message = SseMessage(each.event, self._repairer.repair(each.data)) if has_escape else each
            try:
                deltas += reader.read(message)
            except AntiphonError as error:
                self._failure = error
                break
            except _READER_ERRORS as error:
                self._failure = self._make_unreadable_error(error)
                break
        if not deltas:
            self.check()
        return deltas

    def _make_unreadable_error(self, error: Exception) -> UpstreamError:
        if isinstance(error, _INVALID_DATA):
            shown = describe_value(error, self._secrets)
            return UpstreamError(f"The upstream sent a message that cannot be read: {shown}.")
        unreadable = UpstreamError("The upstream sent a message that cannot be read.")
        unreadable.__cause__ = error  # the log shows which code failed
        return unreadable

    def _shorten_idle_timeout(self) -> None:
        """Shorten the timeout of a complete answer: some servers keep the connection open."""
        if not self._is_shortened and self._reader.is_complete:
            self._is_shortened = True
            self.set_idle_timeout(self._idle_timeout)

    def _finish(self, deltas: list[Delta]) -> list[Delta]:
        """Return the deltas after the end of the stream."""
        try:
            deltas += self._reader.end()
            if not self._reader.finished:
                raise make_broken_stream_error()
        except AntiphonError as error:
            self._failure = error
        if not deltas:
            self.check()
        return deltas

    def _read_json_body(self, body: bytes) -> Sequence[Delta]:
        body = self._repairer.repair(body.lstrip(_BYTE_ORDER_MARK))
        _check_value_count(body)
        if isinstance(self._reader, PlainAnswerReader) and _is_utf8(body) and self._limits.max_answer_events:
            answer = self._reader.read_plain_answer(body)
            if answer:
                return answer
        try:
            payload = _find_error_payload(body)
        except JSON_ERRORS:
            raise make_broken_stream_error() from None
        if payload is not None:
            raise map_error_payload(payload, secrets=self._secrets)
        deltas = self._translate([SseMessage(None, body)], [])
        return deltas if self._reader.finished else self._finish(deltas)

    def _make_web_page_error(self, body: bytes) -> UpstreamError:
        title = cut_message(redact(parse_error_body(body).message, self._secrets))
        return UpstreamError(f"The upstream answered with a web page ({title}): check the base_url.", code=REFUSED)


def _catch_error(function: Callable[..., T], *arguments: Any) -> T | AntiphonError:
    """Return the result or the error: after a cancelled request, the result is not retrieved."""
    try:
        return function(*arguments)
    except AntiphonError as error:
        return error


async def _wait_for(task: "asyncio.Task[Any]") -> None:
    """Wait for a task. Cancelling the wait does not cancel the task."""
    await asyncio.wait([task])


def _has_surrogates(data: bytes) -> bool:
    """Return True if a JSON text may have escaped surrogates, which must be repaired before they are decoded."""
    return _BACKSLASH in data and (b"\\ud" in data or b"\\uD" in data)


def _is_utf8(body: bytes) -> bool:
    """Return True if all of a body is UTF-8. The JSON decoder does not check strings that it skips."""
    try:
        return body.isascii() or bool(body.decode())
    except UnicodeDecodeError:
        return False


def _check_value_count(data: bytes) -> None:
    """Raise if a JSON text has more than the maximum number of values. Separators within strings count, too."""
    if len(data) > MAX_JSON_VALUES and sum(map(data.count, b",[{")) > MAX_JSON_VALUES:
        raise UpstreamError(f"The upstream's answer has more than {MAX_JSON_VALUES} JSON values.", code=REFUSED)


class _ErrorFields(msgspec.Struct):
    error: Any = None
    object: Any = None
    type: Any = None


_decode_error_fields = msgspec.json.Decoder(_ErrorFields).decode


def _find_error_payload(body: bytes) -> Any:
    """Return the JSON of a body that is an error, else None. Raises if the body is not JSON."""
    if body.startswith(b"{"):
        body.decode()  # the JSON decoder does not check strings that it skips
        fields = _decode_error_fields(body)
        if not fields.error and "error" not in (fields.object, fields.type):
            return None
    payload = msgspec.json.decode(body)
    return payload if is_error_payload(payload) else None
