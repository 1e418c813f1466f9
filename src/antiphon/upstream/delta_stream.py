"""An answer as it comes in: bytes off a connection to deltas, one batch for each read."""

import asyncio
import math
from collections.abc import Collection, Sequence
from typing import Protocol

import aiohttp
import msgspec

from antiphon.errors import AntiphonError, UpstreamError
from antiphon.stream.deltas import Delta
from antiphon.stream.sse import SseDecoder, SseMessage, SurrogateRepairer
from antiphon.upstream.error_mapping import (
    NETWORK_ERRORS,
    REFUSED,
    is_error_payload,
    make_broken_stream_error,
    map_error_payload,
    map_network_error,
    mapped_network_errors,
    parse_error_body,
    redact,
)


class Reader(Protocol):
    """Reads one answer, message by message.

    It is `finished` once it has told `Finish` or `Failure`; whatever comes after that is not read. An error that the
    server puts into its stream is raised, as the error of ours that it is: before the first words, the request can then
    still be sent again or elsewhere. A server that does not stream answers with one JSON body, which comes as a single
    message without an event name.

    `is_complete` is true when the answer is complete but not `finished`: the server may still send its usage or an end
    marker. The stream waits only briefly for these, and a broken connection is then not an error.
    """

    finished: bool

    @property
    def is_complete(self) -> bool:
        """Whether nothing but a farewell can be missing. Always false for a reader that cannot tell."""

    def read(self, message: SseMessage) -> Sequence[Delta]:
        """What this message says."""

    def end(self) -> Sequence[Delta]:
        """What is left to say when the server has closed the stream, whether or not it has said that it is over.

        If the answer is not complete, the reader stays unfinished: the stream has broken off then. A connection that
        breaks or falls silent ends only an answer that is complete.
        """


class ReadTimeout:
    """Ends the reading of a body whose connection is lost, or silent for too long.

    aiohttp closes a connection over which nonsense came, but tells nobody who waits for the rest of the body. And a
    timer that looks now and then at how long somebody has been waiting costs a tenth of a time-out around each read.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since: float | None = None
        protocol = response.connection.protocol if response.connection is not None else None
        self._closed = protocol.closed if protocol is not None else None
        if self._closed is not None:
            self._closed.add_done_callback(self._note_loss)
        else:
            self._end(aiohttp.ClientPayloadError())

    async def read(self) -> bytes:
        """What has come since the last time, as soon as there is something; nothing at the end."""
        self._waiting_since = self._loop.time()
        try:
            return await self._content.readany()
        except NETWORK_ERRORS as error:
            raise map_network_error(error) from None
        finally:
            self._waiting_since = None

    def set_idle_timeout(self, seconds: float) -> None:
        """From now on, a read that has to wait for so long fails."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look_at_silence, seconds)

    def _look_at_silence(self, seconds: float) -> None:
        left = seconds
        if self._waiting_since is not None:
            left += self._waiting_since - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look_at_silence, seconds)
        else:
            self._end(aiohttp.SocketTimeoutError())

    def release(self) -> None:
        """The body was read, or is no longer wanted."""
        if self._timer is not None:
            self._timer.cancel()
        if self._closed is not None:
            self._closed.remove_done_callback(self._note_loss)
            # The connection may live on, and its end must then be looked at, by one alone.
            self._closed.remove_done_callback(_look)
            self._closed.add_done_callback(_look)

    def _note_loss(self, closed: "asyncio.Future[None]") -> None:
        _look(closed)
        self._end(aiohttp.ClientPayloadError())

    def _end(self, error: Exception) -> None:
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(error)


def _look(closed: "asyncio.Future[None]") -> None:
    """Take notice of a future's error, which asyncio would log otherwise."""
    if not closed.cancelled():
        closed.exception()


LARGEST_BODY = 64 * 1024 * 1024
LAST_SILENCE = 10.0
"""For how many seconds more is waited for once an answer is complete: what follows then comes at once, or never."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n" + _BYTE_ORDER_MARK
_BEFORE_EVENTS = b"\r\n" + _BYTE_ORDER_MARK  # each for itself: the mark may be cut in two
# What a reader may stumble over that takes for granted what its server has always sent.
_STUMBLES = (msgspec.MsgspecError, RecursionError, LookupError, AttributeError, TypeError, ValueError)


class DeltaStream:
    """Reads the body of a response with a good status: an event stream, or one JSON body from who does not stream.

    Which of them it is, the first byte tells: the content types of some servers are wrong.
    """

    def __init__(self, response: aiohttp.ClientResponse, reader: Reader, *, secrets: Collection[str]) -> None:
        self.response = response
        self._reader = reader
        self._secrets = secrets
        self._decoder: SseDecoder | None = None
        self._mender = SurrogateRepairer()
        self._failure: AntiphonError | None = None
        self._lifeline = ReadTimeout(response)
        self._silence = math.inf
        self._hurried = False

    @property
    def finished(self) -> bool:
        return self._reader.finished

    def set_idle_timeout(self, seconds: float) -> None:
        """From now on, so long a silence ends the answer."""
        self._silence = min(seconds, LAST_SILENCE) if self._hurried else seconds
        self._lifeline.set_idle_timeout(self._silence)

    def close(self) -> None:
        """Hang up, unless all of it has been read: the connection serves others then."""
        self._lifeline.release()
        self.response.close()

    async def read(self) -> Sequence[Delta]:
        """What the next read off the connection says, which may be nothing. Raises if the answer ends unfinished."""
        self.check()
        try:
            chunk = await self._lifeline.read()
        except UpstreamError:
            if not self._reader.is_complete:
                raise
            return self._finish([])
        if self._decoder is None:
            first = chunk.lstrip(_SPACE)[:1]
            if first and first in b"{[":
                return self._read_whole(await self._read_rest(chunk))
            if first == b"<":
                raise self._complain(await self._read_rest(chunk))
            if chunk and not first:
                return ()  # some servers send white space until they know what to answer
            chunk = chunk.lstrip(_BEFORE_EVENTS)
            self._decoder = SseDecoder()
        messages = self._decoder.feed(chunk) if chunk else self._decoder.close()
        deltas = self._read_messages(messages)
        if chunk or self._reader.finished or self._failure is not None:
            self._hurry()
            return deltas
        return self._finish(deltas)

    def check(self) -> None:
        """Raise what has ended the answer after the words that were read last."""
        if self._failure is not None:
            raise self._failure

    def _read_messages(self, messages: Sequence[SseMessage]) -> list[Delta]:
        deltas: list[Delta] = []
        for message in messages:
            if self._reader.finished:
                break
            try:
                deltas += self._read_message(message)
            except AntiphonError as error:
                self._hold(error, deltas)
                break
        return deltas

    def _read_message(self, message: SseMessage) -> Sequence[Delta]:
        mended = self._mender.repair(message.data)
        if mended is not message.data:
            message = SseMessage(message.event, mended)
        try:
            return self._reader.read(message)
        except _STUMBLES as error:
            raise UpstreamError("The upstream sent something that cannot be read.") from error

    def _hurry(self) -> None:
        """Some servers keep the connection open after all is said."""
        if not self._hurried and self._reader.is_complete:
            self._hurried = True
            self.set_idle_timeout(self._silence)

    def _finish(self, deltas: list[Delta]) -> list[Delta]:
        """The stream is over: what there is may be all of it."""
        try:
            deltas += self._reader.end()
            if not self._reader.finished:
                raise make_broken_stream_error()
        except AntiphonError as error:
            self._hold(error, deltas)
        return deltas

    def _hold(self, error: AntiphonError, deltas: list[Delta]) -> None:
        """What was said before an error was said, wherever the network has cut the stream: the error comes next."""
        if not deltas:
            raise error
        self._failure = error

    def _read_whole(self, body: bytes) -> list[Delta]:
        body = self._mender.repair(body.lstrip(_BYTE_ORDER_MARK))
        try:
            payload = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise make_broken_stream_error() from None
        if is_error_payload(payload):
            raise map_error_payload(payload, secrets=self._secrets)
        deltas = self._read_messages([SseMessage(None, body)])
        return deltas if self._reader.finished else self._finish(deltas)

    def _complain(self, body: bytes) -> UpstreamError:
        said = redact(parse_error_body(body).message, self._secrets)
        return UpstreamError(
            f"The upstream answered with a web page: its base_url may be wrong ({said}).", code=REFUSED
        )

    async def _read_rest(self, head: bytes) -> bytes:
        return await read_bounded(self.response, limit=LARGEST_BODY, head=head)


async def read_bounded(response: aiohttp.ClientResponse, *, limit: int, head: bytes = b"") -> bytes:
    """The body of a response, of which `head` was read before."""
    chunks = [head]
    size = len(head)
    with mapped_network_errors():
        while chunk := await response.content.readany():
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                break
    if size > limit:
        raise UpstreamError(f"The upstream's answer is larger than {limit} bytes.", code=REFUSED)
    return b"".join(chunks)
