"""The write timeout: connections of clients that stop reading, or read too slowly, are aborted.

They hold up a model, a file descriptor and buffers. One timer checks all connections, so that a write costs nothing
more. Connections that are closing are checked too: a close waits until the client has read everything.
"""

import asyncio
import socket
import struct
from collections.abc import Collection
from typing import Any, NamedTuple

try:
    import fcntl
    import termios
except ImportError:  # Windows: the kernel's buffer is not seen
    fcntl = None  # type: ignore[assignment]

_CHECKS_PER_TIMEOUT = 8
_NO_LINGER = struct.pack("ii", 1, 0)
_INT = struct.Struct("i")


class WriteStall(NamedTuple):
    """The time since when data waits for a client, and the number of bytes that it had taken at that time."""

    since: float
    taken: int


class WriteTimeout:
    """Aborts the connections of clients that do not take enough data in time.

    A connection is aborted if data for the client has waited at each check within `seconds`, and the client has taken
    less than `min_rate` bytes per second on average. A connection has the attributes `transport`, `bytes_written` and
    `write_stall`.
    """

    def __init__(self, connections: Collection[Any], *, seconds: float, min_rate: float) -> None:
        self._connections = connections
        self._seconds = seconds
        self._min_rate = min_rate
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds / _CHECKS_PER_TIMEOUT, self._check_all, loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_all(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in tuple(self._connections):
            self.check(connection, now)
        self.start()

    def check(self, connection: Any, now: float) -> None:
        """Check one connection. Abort it if its client has not taken enough."""
        waiting = connection.transport.get_write_buffer_size()
        if not waiting:
            connection.write_stall = None
            return
        taken = connection.bytes_written - waiting - count_unacknowledged(connection.transport)
        stall: WriteStall | None = connection.write_stall
        if stall is None:
            connection.write_stall = WriteStall(now, taken)
        elif now - stall.since >= self._seconds:
            if taken - stall.taken < max(1.0, self._min_rate * (now - stall.since)):
                abort_connection(connection.transport)
            else:
                connection.write_stall = WriteStall(now, taken)


def count_unacknowledged(transport: asyncio.Transport) -> int:
    """Return the number of bytes in the kernel that the client has not acknowledged, or 0 if that is unknown.

    The kernel accepts megabytes, and more only when a third of its buffer is free. So without this number, a slow
    client would seem to take nothing for minutes.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or fcntl is None:
        return 0
    try:
        return int(_INT.unpack(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, _INT.pack(0)))[0])
    except (OSError, ValueError):  # it is closed: ValueError if it has no descriptor any more
        return 0


def abort_connection(transport: asyncio.Transport) -> None:
    """Reset a connection. Without the reset, the kernel would hold the unread data for minutes."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
