"""uvicorn's WebSocket protocol with limits, deadlines, a fast path for writes, and a shutdown by the application."""

import asyncio
import codecs
import math
from collections.abc import Iterable
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.protocol import OPEN

from antiphon.server.body_budget import FREE_BYTES, BodyShare
from antiphon.server.connections import ServerLimits, find_address_key
from antiphon.server.deadline import Deadline
from antiphon.server.http import MARK_AUTHENTICATED
from antiphon.server.websocket.socket import WRITE_NOW
from antiphon.server.write_timeout import WriteStall, abort_connection

# Time for the client to answer a close frame.
_CLOSE_TIMEOUT_SECONDS = 2.0
# Data is parsed in parts of this size, because the parser does not stop before the end of its input.
_PARSED_BYTES = 4096
# Number of frames after which other connections have a turn.
_FRAMES_PER_TURN = 512
# A fragment below this size counts as small.
_SMALL_FRAGMENT_BYTES = 1024
_CONTROL_PERIOD_SECONDS = 60.0


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection after its upgrade.

    The application receives one message at a time, and data after it stays unparsed. Writes wait while the client reads
    slowly. A message must arrive at the minimum rate. The first one must begin in time.
    """

    _has_received = False
    _turn_is_due = False
    _frames_in_turn = 0
    _small_fragments = 0
    _control_frames = 0
    _control_period_ends_at = 0.0
    # Bytes of messages: those in the queue, those of an incomplete message, all complete ones, and all at the start of
    # the period in which a minimum must arrive.
    _queued_bytes = 0
    _incomplete_bytes = 0
    _complete_bytes = 0
    _period_bytes = 0
    _first_message_until = 0.0
    _share: BodyShare | None = None
    bytes_written = 0
    write_stall: WriteStall | None = None

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.conn.debug = False  # its debug lines have the headers, with the key of the client, and the messages
        self._limits: ServerLimits = config.limits
        self._settings = self._limits.settings
        self._deadline = Deadline(self.loop, self._time_out)
        self.close_timeout = _CLOSE_TIMEOUT_SECONDS
        self._unparsed = b""
        self._continuation = bytearray()  # the frames of a fragmented message after the first

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.address = find_address_key(self.client)
        self.accepted_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.stop()
        self._limits.connections.admit(self)
        if self._share is not None:
            self._share.close()
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            self.scope = None  # type: ignore[assignment]  # its extensions refer to this object

    def mark_authenticated(self) -> None:
        self._limits.connections.admit(self)

    def find_eviction_order(self) -> None:
        """Return None: the server works for this client."""

    def abort(self) -> None:
        """End the connection at once, without a close frame."""
        abort_connection(self.transport)

    def evict(self) -> None:
        self.transport.abort()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:  # the application starts in the next iteration of the event loop
            self.scope["extensions"][WRITE_NOW] = {
                "write": self.write_now,
                "wait": self.writable.wait,
                "abort": self.abort,
            }
            self.scope["extensions"][MARK_AUTHENTICATED] = {"mark": self.mark_authenticated}

    def check_handshake(self) -> None:
        """Refuse a handshake that the parser of `websockets` has not accepted. It would never be answered."""
        if not self.handshake_initiated and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def shutdown(self) -> None:
        """Leave open connections to the application, which closes them when their responses have ended."""
        if not self.handshake_complete:
            super().shutdown()

    # Writing

    def write_now(self, lines: Iterable[bytes]) -> bool:
        if not self.writable.is_set() or self.conn.state is not OPEN or self.close_sent or self.disconnected:
            return False
        data = encode_frames(lines)
        self.bytes_written += len(data)
        self.transport.write(data)
        return True

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        kind = message["type"]
        if kind == "websocket.send":
            self.bytes_written += len(str(message.get("text")))
        elif kind == "websocket.accept":
            self._first_message_until = self.loop.time() + self._settings.websocket_first_message_seconds
            self._deadline.set(self._settings.websocket_first_message_seconds)
        elif kind == "websocket.close" and self.close_timer is not None:
            self._deadline.stop()
            self.close_timer.cancel()
            self.close_timer = self.loop.call_later(self.close_timeout, self._end_close)
            if self._unparsed and not self._turn_is_due:  # the client's close frame may be there
                self._turn_is_due = True
                self.loop.call_soon(self._take_turn)

    def _end_close(self) -> None:
        # A close of the transport would wait until the client has read everything.
        if self.transport.get_write_buffer_size():
            abort_connection(self.transport)
        else:
            self.transport.close()

    def send_keepalive_ping(self) -> None:
        if self.writable.is_set():
            super().send_keepalive_ping()
        else:  # pings would accumulate in the write buffer
            self.schedule_ping()

    # Reading

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            super().data_received(data)
            return
        self._unparsed += data
        if not self._turn_is_due:
            self._parse()

    def _parse(self) -> None:
        """Parse the received data up to the end of the next message, or until other connections have a turn."""
        self._turn_is_due = False
        self._frames_in_turn = 0
        data, position = self._unparsed, 0
        while position < len(data) and not self.read_paused and not self.transport.is_closing():
            if self._frames_in_turn > _FRAMES_PER_TURN:
                self._turn_is_due = True
                break
            super().data_received(data[position : position + _PARSED_BYTES])
            position += _PARSED_BYTES
        self._unparsed = data[position:]
        if self._turn_is_due:
            self.transport.pause_reading()
            self.loop.call_soon(self._take_turn)
        if not self.transport.is_closing():
            self._count_held()

    def _take_turn(self) -> None:
        if self.transport.is_closing():
            return
        self._parse()
        if not self._turn_is_due and not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> ASGIReceiveEvent:
        message = await self.queue.get()
        if self.queue.empty() and self.read_paused:
            self.read_paused = False
            self._queued_bytes = 0
            if self._unparsed:
                self._turn_is_due = True
                self.loop.call_soon(self._take_turn)
            else:
                self.transport.resume_reading()
            self._count_held()
        elif self.read_paused:
            await asyncio.sleep(0)  # messages of a few bytes arrive by the hundred
        return message

    def send_receive_event_to_app(self) -> None:
        size = sum(map(len, self.frames))
        self._complete_bytes += size
        if not self.close_sent:
            self._queued_bytes += size
            # uvicorn would log the error with a traceback.
            if self.curr_msg_data_type == "text" and not _is_utf8(self.frames):
                self.frames = []
                self._fail(CloseCode.INVALID_DATA, "a text message is not UTF-8")
                return
        super().send_receive_event_to_app()

    def handle_text(self, event: Frame) -> None:
        self._start_message()
        super().handle_text(event)
        event.data = b""  # the parser holds the event until the next one

    def handle_bytes(self, event: Frame) -> None:
        self._start_message()
        super().handle_bytes(event)
        event.data = b""

    def _start_message(self) -> None:
        self._has_received = True
        self._frames_in_turn += 1
        self._small_fragments = 0

    def handle_cont(self, event: Frame) -> None:
        self._frames_in_turn += 1
        if self.close_sent:
            return
        if len(event.data) < _SMALL_FRAGMENT_BYTES:
            self._small_fragments += 1
            if self._small_fragments > self._settings.websocket_max_small_fragments:
                self._fail(CloseCode.MESSAGE_TOO_BIG, "too many small fragments: websocket_max_small_fragments")
                return
        # A message may have many frames. A list of small frames would take far more memory than their data.
        self._continuation += event.data
        event.data = b""
        if event.fin:
            self.frames.append(bytes(self._continuation))
            self._continuation = bytearray()
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        pong = b"".join(self.conn.data_to_send())
        # A client that does not read gets no pongs: they would accumulate in the write buffer.
        if self._count_control_frame() and self.writable.is_set():
            self.bytes_written += len(pong)
            self.transport.write(pong)

    def handle_pong(self, event: Frame) -> None:
        if self._count_control_frame():
            super().handle_pong(event)

    def _count_control_frame(self) -> bool:
        """Count a ping or pong. Return False if the connection is closed, because there are too many."""
        self._frames_in_turn += 1
        now = self.loop.time()
        if now > self._control_period_ends_at:
            self._control_period_ends_at = now + _CONTROL_PERIOD_SECONDS
            self._control_frames = 0
        self._control_frames += 1
        if self._control_frames > self._settings.websocket_max_control_frames:
            self._fail(CloseCode.POLICY_VIOLATION, "too many pings or pongs: websocket_max_control_frames")
        return not self.close_sent

    # Limits

    def _count_held(self) -> None:
        """Count the bytes of messages in memory, and set the deadline for the rest of an incomplete message."""
        incomplete = len(self.conn.reader.buffer) + len(self._continuation) + sum(map(len, self.frames))
        held = incomplete + self._queued_bytes
        if self._share is None and held > FREE_BYTES:
            self._share = self._limits.bodies.open(self._drop)
        if self._share is not None and not self._share.resize(held):
            self._drop()
        elif incomplete and not self._incomplete_bytes:
            self._incomplete_bytes = incomplete
            self._start_period()
        elif not incomplete and self._incomplete_bytes:
            self._deadline.ends_at = math.inf
        if not incomplete and not self._has_received:  # a control frame
            self._deadline.set(max(0.0, self._first_message_until - self.loop.time()))
        self._incomplete_bytes = incomplete

    def _start_period(self) -> None:
        self._period_bytes = self._complete_bytes + self._incomplete_bytes
        self._deadline.set(self._settings.body_timeout_seconds)

    def _time_out(self) -> None:
        received = self._complete_bytes + self._incomplete_bytes - self._period_bytes
        if self.transport.is_closing() or self.close_sent:
            return
        if not self._incomplete_bytes:
            if not self._has_received:
                self._fail(CloseCode.POLICY_VIOLATION, "no message in time: websocket_first_message_seconds")
        elif self.read_paused or received >= self._limits.min_body_bytes:
            self._start_period()
        else:
            self._fail(CloseCode.POLICY_VIOLATION, "the message did not arrive in time")

    def _drop(self) -> None:
        self._fail(CloseCode.TRY_AGAIN_LATER, "too many incomplete messages: body_budget_bytes")

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Close the connection because of a limit or of invalid data. The application sees a disconnect."""
        if self.close_sent or self.transport.is_closing():
            return
        self._unparsed = b""
        self.conn.fail(code, reason)
        self.handle_parser_exception()


def _is_utf8(frames: Iterable[bytes]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for frame in frames:
            decoder.decode(frame)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def encode_frames(lines: Iterable[bytes]) -> bytes:
    """Return the lines as text messages of a server: one unmasked frame each."""
    parts: list[bytes] = []
    for line in lines:
        size = len(line)
        if size < 126:
            parts += (bytes((0x81, size)), line)
        elif size < 65536:
            parts += (b"\x81\x7e" + size.to_bytes(2), line)
        else:
            parts += (b"\x81\x7f" + size.to_bytes(8), line)
    return b"".join(parts)
