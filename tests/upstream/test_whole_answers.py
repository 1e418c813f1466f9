"""Calls without streaming, and the failures after which an upstream is called with streaming."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from antiphon.errors import (
    AntiphonError,
    ContextLengthExceeded,
    InvalidRequest,
    RateLimited,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.stream.deltas import Delta, Finish, Text
from antiphon.stream.sse import SseMessage
from antiphon.upstream.error_mapping import REFUSED, map_error_response
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.whole_answers import STREAMING_SECONDS, WholeAnswers
from support.upstream_client import Connection, WordReader, connect
from support.upstream_server import HANG_UP, RESET, STALL, Piece, Reply, json_of, stream_of

WHOLE = json_of({"text": "Hello"})
STREAM = stream_of(b"data: Hello\n\n", b"data: [DONE]\n\n")
HELLO = [Text("Hello"), Finish()]


class AnswerReader(WordReader):
    """Reads `{"text": …}` as a whole answer, and streams of words."""

    def read(self, message: SseMessage) -> Sequence[Delta]:
        if not message.data.startswith(b"{"):
            return super().read(message)
        self.finished = True
        return [Text(msgspec.json.decode(message.data)["text"]), Finish()]


def write(*, stream: bool) -> tuple[bytes, Mapping[str, str]]:
    return msgspec.json.encode({"stream": stream}), {"Accept": "text/event-stream" if stream else "application/json"}


async def ask(conn: Connection, project: str = "default") -> list[Delta]:
    deltas = await conn.upstream.request_whole("/chat", write, AnswerReader, project=project)
    return [delta async for batch in deltas for delta in batch]


async def ask_and_wait(conn: Connection, *, seconds: float, then: asyncio.Event) -> list[Delta]:
    """Send a request that the server answers `seconds` later, after the event."""
    asking = asyncio.create_task(ask(conn))
    await conn.server.until_requests(len(conn.server.requests) + 1)
    conn.time += seconds
    then.set()
    return await asking


def list_streams(conn: Connection) -> list[bool]:
    return [request.json["stream"] for request in conn.server.requests]


async def test_whole_answer_is_one_batch() -> None:
    async with connect(WHOLE) as conn:
        deltas = await conn.upstream.request_whole("/chat", write, AnswerReader)
        assert [batch async for batch in deltas] == [HELLO]
        (request,) = conn.server.requests
    assert (request.json, request.headers["accept"]) == ({"stream": False}, "application/json")


async def test_connection_of_whole_answers_is_reused() -> None:
    async with connect(*[WHOLE] * 3) as conn:
        for _ in range(3):
            await ask(conn)
        assert conn.server.connections == 1


async def test_slot_is_free_after_whole_answer_is_read() -> None:
    async with connect(WHOLE, WHOLE, max_concurrent=1) as conn:
        deltas = await conn.upstream.request_whole("/chat", write, AnswerReader)
        assert await anext(deltas) == HELLO
        assert await ask(conn) == HELLO  # the first deltas are not closed yet


async def test_server_that_streams_unasked_is_read() -> None:
    async with connect(STREAM) as conn:
        assert await ask(conn) == HELLO
        assert list_streams(conn) == [False]


async def test_always_stream_never_asks_for_whole_answers() -> None:
    async with connect(STREAM, STREAM, always_stream=True) as conn:
        assert [await ask(conn), await ask(conn)] == [HELLO, HELLO]
        assert list_streams(conn) == [True, True]


@pytest.mark.parametrize(
    "broken", [Reply(status=500), Reply(raw=RESET), Reply(body=b'{"text": "He'), stream_of(HANG_UP)]
)
async def test_early_failure_is_retried_without_streaming(broken: Reply) -> None:
    async with connect(broken, WHOLE) as conn:
        assert await ask(conn) == HELLO
        assert (list_streams(conn), len(conn.waits)) == ([False, False], 1)


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_respected_without_streaming(status: int) -> None:
    async with connect(Reply(status=status, headers={"Retry-After": "7"}), WHOLE) as conn:
        assert await ask(conn) == HELLO
        assert (list_streams(conn), conn.waits) == ([False, False], [7.0])


@pytest.mark.parametrize("reply", [Reply(raw=STALL), Reply(pieces=[STALL]), Reply(pieces=[b" ", STALL])])
async def test_cancelling_closes_the_connection(reply: Reply) -> None:
    async with connect(reply) as conn:
        asking = asyncio.create_task(ask(conn))
        await conn.server.until_requests(1)
        asking.cancel()
        await conn.server.until_hang_ups()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize("end", [HANG_UP, RESET])
@pytest.mark.parametrize("sent", [[], [b" \n"], [b'{"text": "He']])
async def test_connection_cut_off_late_is_replaced_by_a_stream(
    end: Piece, sent: list[Piece], caplog: pytest.LogCaptureFixture
) -> None:
    late = asyncio.Event()
    async with connect(Reply(pieces=[*sent, late, end]), STREAM, STREAM, WHOLE, request_retries=0) as conn:
        assert await ask_and_wait(conn, seconds=60, then=late) == HELLO
        assert await ask(conn) == HELLO
        conn.time += STREAMING_SECONDS
        assert await ask(conn) == HELLO
        assert (list_streams(conn), conn.waits) == ([False, True, True, False], [])
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "To stream all answers, set always_stream." in record.message


async def test_connection_cut_off_early_is_retried_without_streaming() -> None:
    early = asyncio.Event()
    async with connect(Reply(pieces=[early, HANG_UP]), WHOLE) as conn:
        assert await ask_and_wait(conn, seconds=14, then=early) == HELLO
        assert list_streams(conn) == [False, False]


async def test_slow_answer_is_read_within_answer_timeout() -> None:
    """An answer may take longer than a stream may take to begin."""
    late = asyncio.Event()
    async with connect(Reply(pieces=[late, b'{"text": "Hello"}']), first_token_timeout=0.01, answer_timeout=60) as conn:
        asking = asyncio.create_task(ask(conn))
        await conn.server.until_requests(1)
        asyncio.get_running_loop().call_later(0.05, late.set)
        assert await asking == HELLO
        assert list_streams(conn) == [False]


async def test_answer_timeout_is_twice_first_token_timeout() -> None:
    late = asyncio.Event()
    async with connect(Reply(pieces=[late, b'{"text": "Hello"}']), first_token_timeout=60) as conn:
        asking = asyncio.create_task(ask(conn))
        await conn.server.until_requests(1)
        loop = asyncio.get_running_loop()
        timers = [handle.when() - loop.time() for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        assert any(119 < left <= 120 for left in timers)
        late.set()
        assert await asking == HELLO


async def test_answer_that_takes_too_long_is_streamed() -> None:
    async with connect(Reply(raw=STALL), STREAM, answer_timeout=0.01, connect_timeout=1) as conn:
        asking = asyncio.create_task(ask(conn))
        await conn.server.until_requests(1)
        conn.time += 600
        assert await asking == HELLO
        assert (list_streams(conn), conn.waits) == ([False, True], [])


@pytest.mark.parametrize(
    "message",
    [
        "This model only support stream mode, please enable the stream parameter to access the model.",
        "parameter.enable_thinking must be set to false for non-streaming calls",
        "Stream must be set to true",
    ],
)
async def test_server_that_requires_streaming_gets_a_stream_request(message: str) -> None:
    async with connect(json_of({"detail": message}, 400), STREAM, STREAM) as conn:
        assert [await ask(conn), await ask(conn)] == [HELLO, HELLO]
        assert (list_streams(conn), conn.waits) == ([False, True, True], [])


async def test_rejection_of_both_forms_is_raised() -> None:
    async with connect(json_of({"detail": "No stream today."}, 400), json_of({"detail": "Never."}, 400)) as conn:
        with pytest.raises(InvalidRequest, match=r"^Never\.$"):
            await ask(conn)


async def test_failure_of_both_forms_does_not_require_streaming() -> None:
    """The message may repeat words of the request, such as the name of a tool."""
    rejected = json_of({"detail": "Unknown tool: stream"}, 400)
    async with connect(rejected, rejected, WHOLE) as conn:
        with pytest.raises(InvalidRequest):
            await ask(conn)
        assert await ask(conn) == HELLO
        assert list_streams(conn) == [False, True, False]


async def test_requests_of_one_project_do_not_affect_others() -> None:
    async with connect(json_of({"detail": "Stream must be true"}, 400), STREAM, WHOLE, STREAM) as conn:
        assert [await ask(conn, project) for project in ("a", "b", "a")] == [HELLO] * 3
        assert list_streams(conn) == [False, True, False, True]


async def test_streamed_attempt_is_repeated_with_streaming() -> None:
    late = asyncio.Event()
    async with connect(Reply(pieces=[late, HANG_UP]), Reply(status=500), STREAM) as conn:
        assert await ask_and_wait(conn, seconds=60, then=late) == HELLO
        assert (list_streams(conn), len(conn.waits)) == ([False, True, True], 1)


async def test_other_rejection_is_raised_at_once() -> None:
    async with connect(json_of({"detail": "The upstream has no such field."}, 400)) as conn:
        with pytest.raises(InvalidRequest):
            await ask(conn)
        assert list_streams(conn) == [False]


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504, 520, 522, 524, 529])
def test_gateway_error_after_a_long_wait_requires_streaming(status: int) -> None:
    assert may_need_streaming(map_error_response(status, b"<html><title>Gateway</title></html>"), seconds=15)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (UpstreamTimeout("The connection to the upstream timed out."), 14.9),
        (UpstreamError("The upstream closed the connection."), 3),
        (Unavailable("The upstream is overloaded.", retry_after=2), 60),
        (UpstreamError("The TLS handshake with the upstream failed.", code=REFUSED), 60),
        (RateLimited("Too many streams."), 60),
        (ContextLengthExceeded("Too long."), 60),
        (InvalidRequest("The upstream rejected the request without a reason."), 60),
    ],
)
def test_other_failures_do_not_require_streaming(error: AntiphonError, seconds: float) -> None:
    assert not may_need_streaming(error, seconds=seconds)


def may_need_streaming(error: AntiphonError, *, seconds: float) -> bool:
    whole_answers = WholeAnswers("up", UpstreamOptions(base_url="http://127.0.0.1/v1"), now=lambda: 1000.0)
    return whole_answers.may_need_streaming(error, seconds=seconds)


@pytest.mark.parametrize("options", [{"answer_timeout": 0}, {"answer_timeout": 90_000}, {"always_stream": "yes"}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"base_url": "http://127.0.0.1/v1"} | options, UpstreamOptions)
