"""Frames of worker processes."""

import io

import msgspec
import pytest

from antiphon.worker_frames import read_frame, write_frame


class Message(msgspec.Struct):
    text: str


def test_frames_are_read_in_their_order() -> None:
    stream = io.BytesIO()
    for text in ("one", "two"):
        write_frame(stream, Message(text))
    stream.seek(0)
    frames = [read_frame(stream), read_frame(stream)]
    assert [msgspec.msgpack.decode(each or b"", type=Message) for each in frames] == [Message("one"), Message("two")]
    assert read_frame(stream) is None


@pytest.mark.parametrize("size", [0, 3, 4, 9])
def test_incomplete_frame_is_the_end_of_the_stream(size: int) -> None:
    stream = io.BytesIO()
    write_frame(stream, Message("one"))
    assert read_frame(io.BytesIO(stream.getvalue()[:size])) is None
