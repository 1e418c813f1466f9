"""The messages between the supervisor and its workers, and the channel that transports them.

A frame is msgpack with a length of four bytes.
"""

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from antiphon.config.settings import Settings

# A worker that does not read gets no further messages beyond this size: those that matter are sent to few workers.
_MAX_UNSENT_BYTES = 16 * 1024 * 1024
_LENGTH_BYTES = 4


class Start(Struct, tag=True, frozen=True):
    """The first message to a worker. `number` counts from 1."""

    number: int
    settings: Settings
    module_path: list[str]


class Reload(Struct, tag=True, frozen=True):
    """New settings. The worker answers with `Reloaded`."""

    settings: Settings


class Question(Struct, tag=True, frozen=True):
    """A question of another worker. Without an id, it is an announcement and has no answer."""

    kind: str
    payload: bytes
    id: int | None = None


class Answers(Struct, tag=True, frozen=True):
    """The answers of the other workers to a question. A worker that does not answer is left out.

    `silent_seconds` is the time for which one has not answered, or None if all have.
    """

    id: int
    answers: list[bytes]
    silent_seconds: float | None = None


class WorkerDied(Struct, tag=True, frozen=True):
    """Another worker has died. `owner` is its name in the queue of background responses."""

    owner: str


class WorkerReady(Struct, tag=True, frozen=True):
    """The worker accepts requests. `owner` is its name in the queue of background responses."""

    models: list[str]
    needs_key: bool
    owner: str = ""


class WorkerFailed(Struct, tag=True, frozen=True):
    """The worker cannot start."""

    message: str


class Reloaded(Struct, tag=True, frozen=True):
    """The result of a reload: an error, or None."""

    error: str | None = None


class Answer(Struct, tag=True, frozen=True):
    """The answer of a worker to a question. An empty one is left out."""

    id: int
    payload: bytes


ToWorker = Start | Reload | Question | Answers | WorkerDied
ToSupervisor = WorkerReady | WorkerFailed | Reloaded | Question | Answer


class Channel:
    """One end of the connection between the supervisor and a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connection: socket.socket) -> "Channel":
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def send(self, message: ToWorker | ToSupervisor) -> None:
        """Send a message, or drop it if the receiver has ended or does not read. `receive` notices its end."""
        # A closed transport of uvloop raises RuntimeError, and one of asyncio logs a warning.
        if not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() < _MAX_UNSENT_BYTES:
            self._writer.write(encode_frame(message))

    async def receive(self) -> bytes | None:
        """Return the next message, encoded, or None if the other process has ended."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()


def encode_frame(message: ToWorker | ToSupervisor) -> bytes:
    data = msgspec.msgpack.encode(message, enc_hook=str)  # a path is a text
    return len(data).to_bytes(_LENGTH_BYTES) + data


def _decode_path(kind: type[Any], value: Any) -> Any:
    if kind is not Path:
        raise NotImplementedError(kind)
    return Path(value)


_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker, dec_hook=_decode_path)
_to_supervisor: msgspec.msgpack.Decoder[ToSupervisor] = msgspec.msgpack.Decoder(ToSupervisor)
decode_for_worker = _to_worker.decode
decode_for_supervisor = _to_supervisor.decode


def receive_start(connection: socket.socket) -> Start | None:
    """Return the first message, before there is an event loop. None if the supervisor has ended."""
    length = int.from_bytes(_read_exactly(connection, _LENGTH_BYTES))
    data = _read_exactly(connection, length)
    message = decode_for_worker(data) if data and len(data) == length else None
    return message if isinstance(message, Start) else None


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data
