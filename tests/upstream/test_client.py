import asyncio
import json
import logging
from typing import Any

import pytest

from antiphon.errors import AntiphonError, InvalidRequest, RateLimited, Unavailable, UpstreamError, UpstreamTimeout
from antiphon.stream.deltas import Finish, Text
from support.upstream_server import HANG_UP, RESET, STALL, Raw, Reply, json_of, stream_of

HELLO = stream_of(b"data: Hello\n\n", b"data: [DONE]\n\n")
WORDS = [[Text("Hello")], [Finish()]]
AT_ONCE = 0.05


def flatten(batches: Any) -> list[Any]:
    return [delta for batch in batches for delta in batch]


async def test_a_request_carries_its_body_and_the_headers_and_queries_of_all(connect: Any) -> None:
    async with connect(HELLO, headers={"X-Team": "blue"}, query={"api-version": "1"}) as line:
        deltas = await line.begin("/chat?beta=true", b'{"a":1}', **{"X-Turn": "7"})
        assert flatten([batch async for batch in deltas]) == flatten(WORDS)
        request = line.server.requests[0]
    assert (request.method, request.path, request.query, request.json) == (
        "POST",
        "/v1/chat",
        {"beta": "true", "api-version": "1"},
        {"a": 1},
    )
    names = ("authorization", "x-team", "x-turn", "content-type", "accept-encoding")
    assert {name: request.headers[name] for name in names} == {
        "authorization": "Bearer sk-upstream-0123456789",
        "x-team": "blue",
        "x-turn": "7",
        "content-type": "application/json",
        "accept-encoding": "identity",
    }


async def test_a_large_body_is_sent_whole(connect: Any) -> None:
    body = json.dumps("x" * 3_000_000).encode()
    async with connect(HELLO) as line:
        deltas = await line.begin(body=body)
        assert flatten([batch async for batch in deltas]) == flatten(WORDS)
        assert line.server.requests[0].body == body


async def test_a_message_may_be_cut_anywhere(connect: Any) -> None:
    raw = b": hello\r\n\r\ndata: \xc3\xa4\r\n\r\ndata: [DONE]\r\n\r\n"
    async with connect(stream_of(*(raw[at : at + 1] for at in range(len(raw))))) as line:
        assert flatten(await line.ask()) == [Text("ä"), Finish()]


async def test_what_comes_in_one_read_is_one_batch(connect: Any) -> None:
    async with connect(stream_of(b"data: a\n\ndata: b\n\ndata: -\n\ndata: [DONE]\n\ndata: late\n\n")) as line:
        assert await line.ask() == [[Text("a"), Text("b"), Finish()]]


async def test_the_answer_is_returned_when_its_first_words_are_there(connect: Any) -> None:
    more = asyncio.Event()
    async with connect(stream_of(b": alive\n\ndata: -\n\ndata: a\n\n", more, b"data: [DONE]\n\n")) as line:
        deltas = await line.begin()
        assert await anext(deltas) == [Text("a")]
        more.set()
        assert await anext(deltas) == [Finish()]
        await deltas.aclose()


async def test_a_connection_is_used_again(connect: Any) -> None:
    whole = Reply(body=b"data: Hello\n\ndata: [DONE]\n\n")
    async with connect(whole, json_of({"error": "x"}, 400), whole) as line:
        await line.ask()
        with pytest.raises(InvalidRequest):
            await line.ask()
        await line.ask()
        assert line.server.connections == 1


async def test_the_rest_of_a_finished_answer_does_not_cost_the_connection(connect: Any) -> None:
    async with connect(*[HELLO] * 20) as line:
        for _ in range(20):
            await line.ask()
        assert line.server.connections < 10


async def test_closing_the_answer_hangs_up_at_once(connect: Any) -> None:
    async with connect(stream_of(b"data: a\n\n", STALL)) as line:
        deltas = await line.begin()
        assert await anext(deltas) == [Text("a")]
        await deltas.aclose()
        await line.server.until_hang_ups()


async def test_an_answer_that_nobody_reads_is_hung_up_too(connect: Any) -> None:
    async with connect(stream_of(b"data: a\n\n", STALL), HELLO, max_concurrent=1) as line:
        deltas = await line.begin()
        await deltas.aclose()
        await line.server.until_hang_ups()
        assert flatten(await line.ask()) == flatten(WORDS)


@pytest.mark.parametrize("reply", [Reply(raw=STALL), stream_of(STALL), stream_of(b": alive\n\n", STALL)])
async def test_cancelling_the_call_hangs_up_before_the_first_words(connect: Any, reply: Reply) -> None:
    async with connect(reply) as line:
        call = asyncio.create_task(line.begin())
        await line.server.until_requests(1)
        call.cancel()
        await line.server.until_hang_ups()
        with pytest.raises(asyncio.CancelledError):
            await call


@pytest.mark.parametrize(
    "broken",
    [
        Reply(raw=RESET),
        Reply(raw=b""),
        Reply(raw=b"garbage\r\n\r\n"),
        Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Le"),
        Reply(status=500),
        Reply(status=502, body=b"<html><title>Bad gateway</title></html>"),
        Reply(status=503),
        Reply(status=504),
        Reply(status=529),
        Reply(status=408),
        Reply(status=409),
        Reply(status=429),
        stream_of(RESET),
        stream_of(HANG_UP),
        stream_of(b": alive\n\n", RESET),
        stream_of(b"data: -\n\n", HANG_UP),
        stream_of(b"data: -\n\n"),
        stream_of(),
        stream_of(b"data: Hel", HANG_UP),
        stream_of(Raw(b"no chunk\r\n")),
        Reply(body=b""),
        Reply(body=b'{"half": "an ans'),
    ],
)
async def test_what_fails_before_the_first_words_is_asked_again(connect: Any, broken: Reply) -> None:
    async with connect(broken, HELLO) as line:
        assert flatten(await line.ask()) == flatten(WORDS)
        assert len(line.server.requests) == 2
        assert [0.18 <= wait <= 0.22 for wait in line.waits] == [True]


async def test_requests_are_repeated_with_growing_waits_and_not_for_ever(connect: Any) -> None:
    async with connect(*[Reply(status=500, body=b"oh")] * 5, HELLO) as line:
        with pytest.raises(UpstreamError, match=r"^The upstream failed: oh$"):
            await line.ask()
        assert len(line.server.requests) == 5
        assert [
            round(wait / base, 1) in (0.9, 1.0, 1.1)
            for wait, base in zip(line.waits, (0.2, 0.4, 0.8, 1.6), strict=True)
        ] == [True] * 4


async def test_broken_streams_have_a_count_of_their_own(connect: Any) -> None:
    async with connect(*[stream_of(HANG_UP)] * 5, *[Reply(status=500)] * 4, HELLO) as line:
        assert flatten(await line.ask()) == flatten(WORDS)
        assert len(line.waits) == 9


async def test_without_retries_the_first_failure_counts(connect: Any) -> None:
    async with connect(stream_of(HANG_UP), HELLO, stream_retries=0) as line:
        with pytest.raises(UpstreamError, match="closed before the answer ended"):
            await line.ask()
        assert line.waits == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422, 302])
async def test_a_refusal_is_not_asked_again(connect: Any, status: int) -> None:
    async with connect(Reply(status=status, headers={"Location": "/elsewhere"}), HELLO) as line:
        with pytest.raises(AntiphonError):
            await line.ask()
        assert len(line.server.requests) == 1


@pytest.mark.parametrize("code", ["insufficient_quota", "usage_limit_reached", "usage_not_included"])
async def test_a_spent_quota_is_not_asked_again(connect: Any, code: str) -> None:
    async with connect(json_of({"error": {"message": "Spent.", "code": code}}, 429), HELLO) as line:
        with pytest.raises(RateLimited) as raised:
            await line.ask()
        assert (raised.value.message, raised.value.code) == ("Spent.", code)
        assert len(line.server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "wait"),
    [
        (Reply(status=429, headers={"Retry-After": "7"}), 7.0),
        (Reply(status=503, headers={"Retry-After": "1.5"}), 1.5),
        (Reply(status=429, headers={"retry-after-ms": "250", "Retry-After": "1"}), 0.25),
        (json_of({"error": {"message": "Please try again in 2.5s."}}, 429), 2.5),
        (stream_of(b'{"error":{"message":"Please try again in 40ms.","code":"rate_limit_exceeded"}}'), 0.04),
    ],
)
async def test_the_wait_that_is_asked_for_is_waited(connect: Any, reply: Reply, wait: float) -> None:
    async with connect(reply, HELLO) as line:
        assert flatten(await line.ask()) == flatten(WORDS)
        assert line.waits == [pytest.approx(wait)]


async def test_a_wait_that_is_too_long_is_told_instead(connect: Any) -> None:
    async with connect(Reply(status=429, headers={"Retry-After": "61"}), HELLO) as line:
        with pytest.raises(RateLimited) as raised:
            await line.ask()
        assert (raised.value.retry_after, line.waits) == (61.0, [])


@pytest.mark.parametrize("end", [RESET, HANG_UP, Raw(b"no chunk\r\n"), Raw(b"0\r\n\r\n")])
async def test_after_the_first_words_nothing_is_asked_again(connect: Any, end: Any) -> None:
    more = asyncio.Event()
    async with connect(stream_of(b"data: a\n\n", more, end), HELLO) as line:
        deltas = await line.begin()
        assert await anext(deltas) == [Text("a")]
        more.set()
        with pytest.raises(UpstreamError, match=r"before the answer ended|The upstream closed the connection"):
            await anext(deltas)
        assert len(line.server.requests) == 1


async def test_a_body_that_is_not_a_stream_is_read_whole(connect: Any) -> None:
    async with connect(json_of({"a": 1}), stream_retries=0) as line:
        with pytest.raises(UpstreamError, match="before the answer ended"):  # this dialect has an end, the body has not
            await line.ask()


async def test_an_error_in_a_good_answer_is_an_error(connect: Any) -> None:
    async with connect(json_of({"error": {"message": "No.", "type": "invalid_request_error", "param": "x"}})) as line:
        with pytest.raises(InvalidRequest, match=r"^No\.$") as raised:
            await line.ask()
        assert raised.value.param == "x"


async def test_a_web_page_is_not_an_answer(connect: Any) -> None:
    async with connect(Reply(body=b"\n<!doctype html><title>Welcome!</title>")) as line:
        with pytest.raises(UpstreamError, match=r"web page.*Welcome!"):
            await line.ask()
        assert len(line.server.requests) == 1


async def test_signs_of_life_do_not_count_as_words(connect: Any) -> None:
    async with connect(stream_of(b": alive\n\n", STALL), first_token_timeout=AT_ONCE, stream_retries=0) as line:
        with pytest.raises(UpstreamTimeout, match="did not answer in time"):
            await line.ask()
        await line.server.until_hang_ups()


async def test_a_late_answer_is_asked_for_again(connect: Any) -> None:
    async with connect(Reply(raw=STALL), HELLO, first_token_timeout=2 * AT_ONCE) as line:
        assert flatten(await line.ask()) == flatten(WORDS)


async def test_a_silence_in_the_answer_ends_it(connect: Any) -> None:
    async with connect(stream_of(b"data: a\n\n", STALL), idle_timeout=AT_ONCE) as line:
        deltas = await line.begin()
        assert await anext(deltas) == [Text("a")]
        with pytest.raises(UpstreamTimeout, match="stopped sending"):
            await anext(deltas)
        await line.server.until_hang_ups()


async def test_calls_wait_their_turn_in_order(connect: Any) -> None:
    async with connect(*[stream_of(b"data: a\n\n", STALL)] * 3, max_concurrent=1) as line:
        first = await line.begin("/first")
        second, third, fourth = (asyncio.create_task(line.begin(path)) for path in ("/second", "/third", "/fourth"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait({second})
        await first.aclose()
        await (await third).aclose()
        await (await fourth).aclose()
        assert [request.path for request in line.server.requests] == ["/v1/first", "/v1/third", "/v1/fourth"]


async def test_a_server_that_keeps_failing_is_left_alone_and_then_tried(connect: Any) -> None:
    async with connect(*[Reply(status=500)] * 6, HELLO, HELLO, request_retries=0) as line:
        for _ in range(5):
            with pytest.raises(UpstreamError):
                await line.ask()
        with pytest.raises(Unavailable, match="paused") as raised:
            await line.ask()
        assert (raised.value.retry_after, len(line.server.requests)) == (10.0, 5)
        line.time += 10
        with pytest.raises(UpstreamError):
            await line.ask()
        line.time += 19
        with pytest.raises(Unavailable):
            await line.ask()
        line.time += 1
        assert [flatten(await line.ask()) for _ in range(2)] == [flatten(WORDS)] * 2


async def test_json_is_fetched(connect: Any) -> None:
    async with connect(json_of({"data": []})) as line:
        assert await line.upstream.get_json("/models") == {"data": []}
        assert (line.server.requests[0].method, line.server.requests[0].path) == ("GET", "/v1/models")


async def test_a_fetch_is_not_repeated(connect: Any) -> None:
    async with connect(Reply(status=500), Reply(body=b"text")) as line:
        with pytest.raises(UpstreamError):
            await line.upstream.get_json("/models")
        with pytest.raises(UpstreamError, match="not JSON"):
            await line.upstream.get_json("/models")
        assert len(line.server.requests) == 2


async def test_a_question_that_is_not_streamed_is_repeated(connect: Any) -> None:
    async with connect(Reply(status=500), Reply(raw=RESET), json_of({"tokens": 3})) as line:
        assert json.loads(await line.upstream.post_json("/count", b"{}")) == {"tokens": 3}
        assert len(line.server.requests) == 3


async def test_neither_errors_nor_the_log_tell_keys_or_addresses(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(request_retries=1) as line:
        port = line.server.port
        told = f"Bad key sk-upstream-0123456789 for http://127.0.0.1:{port}/v1/chat, or 127.0.0.1:{port}."
        line.server.add(json_of({"error": {"message": told}}, 500), json_of({"error": {"message": told}}, 401))
        with caplog.at_level(logging.DEBUG, logger="antiphon"), pytest.raises(UpstreamError) as raised:
            await line.ask()
    texts = [raised.value.message, caplog.text]
    assert [secret for secret in ("0123456789", str(port), "127.0.0.1") for text in texts if secret in text] == []
    assert "backend there: " in caplog.text


async def test_a_closed_upstream_says_so(connect: Any) -> None:
    async with connect() as line:
        await line.upstream.close()
        with pytest.raises(UpstreamError, match="closed"):
            await line.ask()
        assert line.waits == []


async def test_closing_ends_the_answers_under_way(connect: Any) -> None:
    async with connect(stream_of(b"data: a\n\n", STALL), stream_of(STALL)) as line:
        deltas = await line.begin()
        assert await anext(deltas) == [Text("a")]
        waiting = asyncio.create_task(line.begin())
        await line.server.until_requests(2)
        await line.upstream.close()
        await line.server.until_hang_ups(2)
        with pytest.raises(UpstreamError):
            await anext(deltas)
        with pytest.raises(UpstreamError):
            await waiting
