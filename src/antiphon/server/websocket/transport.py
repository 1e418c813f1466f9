"""uvicorn's side of a WebSocket, with a short way out for streams, and an end that the application decides on."""

from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import OPEN

from antiphon.server.stalling import StallGuard

WRITE_NOW = "antiphon.write_now"
"""An extension of ASGI: `write` sends text messages in one go if that takes no waiting, and says whether it did."""

# How long a client may take to say goodbye in return.
_FAREWELL_SECONDS = 2.0


class Transport(StallGuard, WebSocketsSansIOProtocol):
    """One connection after its upgrade.

    What comes in is read a message at a time, when the application asks for it. What goes out waits for the client.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.close_timeout = _FAREWELL_SECONDS
        self._rest = bytearray()  # of a message, after its first piece

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:  # the application starts only when the loop goes on
            self.scope["extensions"][WRITE_NOW] = {"write": self.write_now}

    def write_now(self, lines: Iterable[bytes]) -> bool:
        if not self.writable.is_set() or self.conn.state is not OPEN or self.close_sent or self.disconnected:
            return False
        self.transport.write(encode_frames(lines))
        return True

    def shutdown(self) -> None:
        """The server stops. The application lets responses come to their end, and then closes the connection."""
        if not self.handshake_complete:
            super().shutdown()

    def handle_cont(self, event: Frame) -> None:
        # A message may come in any number of pieces. In a list, small ones would take far more than what is in them.
        self._rest += event.data
        if event.fin:
            self.frames.append(bytes(self._rest))
            self._rest.clear()
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        pong = b"".join(self.conn.data_to_send())
        # Whoever reads nothing gets no answers either: they would pile up here.
        if self.writable.is_set():
            self.transport.write(pong)


def encode_frames(lines: Iterable[bytes]) -> bytes:
    """Text messages of a server: each whole in one frame, and not masked."""
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
