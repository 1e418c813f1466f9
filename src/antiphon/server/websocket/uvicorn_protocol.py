"""uvicorn's WebSocket protocol with a fast path for writes, a write timeout, and a shutdown by the application."""

from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import OPEN

from antiphon.server.websocket.socket import WRITE_NOW
from antiphon.server.write_timeout import WriteTimeoutMixin

# Time for the client to answer a close frame.
_CLOSE_TIMEOUT_SECONDS = 2.0


class WebSocketProtocol(WriteTimeoutMixin, WebSocketsSansIOProtocol):
    """One connection after its upgrade.

    The application receives one message at a time. Writes wait while the client reads slowly.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.close_timeout = _CLOSE_TIMEOUT_SECONDS
        self._continuation = bytearray()  # the frames of a fragmented message after the first

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:  # the application starts in the next iteration of the event loop
            self.scope["extensions"][WRITE_NOW] = {"write": self.write_now}

    def write_now(self, lines: Iterable[bytes]) -> bool:
        if not self.writable.is_set() or self.conn.state is not OPEN or self.close_sent or self.disconnected:
            return False
        self.transport.write(encode_frames(lines))
        return True

    def shutdown(self) -> None:
        """Leave open connections to the application, which closes them when their responses have ended."""
        if not self.handshake_complete:
            super().shutdown()

    def handle_cont(self, event: Frame) -> None:
        # A message may have any number of frames. A list of small frames would take far more memory than their data.
        self._continuation += event.data
        if event.fin:
            self.frames.append(bytes(self._continuation))
            self._continuation.clear()
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        pong = b"".join(self.conn.data_to_send())
        # A client that does not read gets no pongs: they would accumulate in the write buffer.
        if self.writable.is_set():
            self.transport.write(pong)


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
