"""The channel between the supervisor and a worker."""

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from antiphon.server.workers import messages
from antiphon.server.workers.messages import Channel, Question, decode_for_supervisor

QUESTION = Question("kind", b"x" * 1000)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

on_both_loops = pytest.mark.parametrize(
    "make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@on_both_loops
def test_messages_to_a_receiver_that_has_ended_are_dropped(
    make_loop: LoopFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async def send_to_ended() -> bytes | None:
        ours, theirs = socket.socketpair()
        channel = await Channel.open(ours)
        theirs.close()
        received = await channel.receive()
        for _ in range(20):
            channel.send(QUESTION)
            await asyncio.sleep(0)
        channel.close()
        channel.send(QUESTION)
        return received

    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert runner.run(send_to_ended()) is None
    assert caplog.messages == []


@on_both_loops
def test_messages_to_a_receiver_that_does_not_read_are_bounded(
    make_loop: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_MAX_UNSENT_BYTES", 10_000)

    async def send_to_frozen() -> tuple[int, bool]:
        ours, theirs = socket.socketpair()
        channel, other = await Channel.open(ours), await Channel.open(theirs)
        other._reader._transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(5000):
            channel.send(QUESTION)
        unsent = channel._writer.transport.get_write_buffer_size()
        other._reader._transport.resume_reading()  # type: ignore[attr-defined]
        frame = await other.receive()
        channel.close()
        other.close()
        return unsent, frame is not None and decode_for_supervisor(frame) == QUESTION

    with asyncio.Runner(loop_factory=make_loop) as runner:
        unsent, is_received = runner.run(send_to_frozen())
    assert 10_000 <= unsent < 20_000
    assert is_received
