"""Frames in a worker process: msgpack with a length of four bytes. `framed_process.py` is the other end."""

import os
import queue
from typing import BinaryIO, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame; None at the end of the stream, even if a frame is incomplete because the server died."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head)
    frame = stream.read(size)
    return frame if len(frame) == size else None


def write_frame(stream: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(4) + data)
    stream.flush()


def queue_frames(stdin: BinaryIO, messages: "queue.SimpleQueue[T]", kind: type[T]) -> None:
    """Queue the messages. At the end of stdin, end the process, because the server has ended or wants it to end."""
    while (frame := read_frame(stdin)) is not None:
        messages.put(msgspec.msgpack.decode(frame, type=kind))
    os._exit(0)
