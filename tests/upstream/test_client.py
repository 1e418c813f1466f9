import asyncio
import gc
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from antiphon.errors import AntiphonError, InvalidRequest, RateLimited, Unavailable, UpstreamError, UpstreamTimeout
from antiphon.stream.deltas import Delta, Finish, Text
from antiphon.stream.sse import SseMessage
from support.garbage import expect_no_garbage
from support.http_proxy import serve_proxy
from support.upstream_client import WordReader, connect
from support.upstream_server import HANG_UP, RESET, STALL, Raw, Reply, json_of, stream_of

HELLO = stream_of(b"data: Hello\n\n", b"data: [DONE]\n\n")
WORDS = [[Text("Hello")], [Finish()]]
AT_ONCE = 0.05


def flatten(batches: Any) -> list[Any]:
    return [delta for batch in batches for delta in batch]


async def test_request_has_body_and_configured_headers_and_query() -> None:
    async with connect(HELLO, headers={"X-Team": "blue"}, query={"api-version": "1"}) as conn:
        deltas = await conn.begin("/chat?beta=true", b'{"a":1}', **{"X-Turn": "7"})
        assert flatten([batch async for batch in deltas]) == flatten(WORDS)
        request = conn.server.requests[0]
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


async def test_proxy_of_the_environment_is_used_only_if_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with serve_proxy() as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with connect(HELLO) as conn:
            assert flatten(await conn.ask()) == flatten(WORDS)
        assert proxy.heads == []
        async with connect(Reply(body=b"data: Hello\n\ndata: [DONE]\n\n"), trust_env=True) as conn:
            assert flatten(await conn.ask()) == flatten(WORDS)
            await conn.upstream.close()
        assert [head[0] for head in proxy.heads] == [f"POST {conn.server.url}/chat HTTP/1.1"]


async def test_large_body_is_sent_completely() -> None:
    body = json.dumps("x" * 3_000_000).encode()
    async with connect(HELLO) as conn:
        deltas = await conn.begin(body=body)
        assert flatten([batch async for batch in deltas]) == flatten(WORDS)
        assert conn.server.requests[0].body == body


async def test_message_may_be_split_at_any_byte() -> None:
    raw = b": hello\r\n\r\ndata: \xc3\xa4\r\n\r\ndata: [DONE]\r\n\r\n"
    async with connect(stream_of(*(raw[at : at + 1] for at in range(len(raw))))) as conn:
        assert flatten(await conn.ask()) == [Text("ä"), Finish()]


async def test_deltas_of_one_read_are_one_batch() -> None:
    async with connect(stream_of(b"data: a\n\ndata: b\n\ndata: -\n\ndata: [DONE]\n\ndata: late\n\n")) as conn:
        assert await conn.ask() == [[Text("a"), Text("b"), Finish()]]


class LetterReader(WordReader):
    """Each letter of a message is a delta."""

    def read(self, message: SseMessage) -> Sequence[Delta]:
        whole = super().read(message)
        return [Text(letter) for each in whole for letter in each.text] if message.data != b"[DONE]" else whole


async def test_deltas_of_a_large_message_are_returned_in_slices() -> None:
    """Other tasks run between the slices."""
    text, more, turns = "x" * 2500, asyncio.Event(), [0]

    async def count_turns() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    large = f"data: {text}\n\n".encode()
    async with connect(stream_of(large, more, large, b"data: [DONE]\n\n")) as conn:
        counter = asyncio.create_task(count_turns())
        batches, seen = list[Sequence[Delta]](), list[int]()
        async for batch in await conn.upstream.stream("/chat", b"{}", LetterReader):
            batches.append(batch)
            seen.append(turns[0])
            if len(flatten(batches)) == len(text):
                more.set()
        counter.cancel()
    assert flatten(batches) == [*[Text("x")] * 5000, Finish()]
    assert [len(batch) for batch in batches[:5]] == [1000, 1000, 500, 1000, 1000]
    assert seen[:5] == sorted(set(seen[:5]))


async def test_stream_returns_after_the_first_deltas() -> None:
    more = asyncio.Event()
    async with connect(stream_of(b": alive\n\ndata: -\n\ndata: a\n\n", more, b"data: [DONE]\n\n")) as conn:
        deltas = await conn.begin()
        assert await anext(deltas) == [Text("a")]
        more.set()
        assert await anext(deltas) == [Finish()]
        await deltas.aclose()


async def test_connection_is_reused() -> None:
    whole = Reply(body=b"data: Hello\n\ndata: [DONE]\n\n")
    async with connect(whole, json_of({"error": "x"}, 400), whole) as conn:
        await conn.ask()
        with pytest.raises(InvalidRequest):
            await conn.ask()
        await conn.ask()
        assert conn.server.connections == 1


@pytest.mark.parametrize("end", [HANG_UP, RESET])
async def test_connection_closed_while_idle_is_replaced_silently(end: Any, caplog: pytest.LogCaptureFixture) -> None:
    whole = Reply(body=b"data: Hello\n\ndata: [DONE]\n\n")
    async with connect(*[whole, Reply(raw=end)] * 6, whole, request_retries=0) as conn:
        for _ in range(7):  # more often than the circuit breaker permits
            assert flatten(await conn.ask()) == flatten(WORDS)
        assert (conn.server.connections, conn.waits, caplog.records) == (7, [], [])


async def test_rest_of_a_finished_answer_is_drained() -> None:
    async with connect(*[HELLO] * 20) as conn:
        for _ in range(20):
            await conn.ask()
        assert conn.server.connections < 10


async def test_closing_the_stream_closes_the_connection() -> None:
    async with connect(stream_of(b"data: a\n\n", STALL)) as conn:
        deltas = await conn.begin()
        assert await anext(deltas) == [Text("a")]
        await deltas.aclose()
        await conn.server.until_hang_ups()


async def test_closing_an_unread_stream_closes_the_connection() -> None:
    async with connect(stream_of(b"data: a\n\n", STALL), HELLO, max_concurrent=1) as conn:
        deltas = await conn.begin()
        await deltas.aclose()
        await conn.server.until_hang_ups()
        assert flatten(await conn.ask()) == flatten(WORDS)


async def test_dropping_an_unclosed_stream_frees_connection_and_slot() -> None:
    async with connect(stream_of(b"data: a\n\n", STALL), HELLO, max_concurrent=1) as conn:
        deltas = await conn.begin()
        del deltas
        gc.collect()
        await conn.server.until_hang_ups()
        assert flatten(await conn.ask()) == flatten(WORDS)


async def test_closed_or_failed_stream_only_ends() -> None:
    async with connect(stream_of(b"data: a\n\n", STALL), stream_of(b"data: a\n\n", HANG_UP)) as conn:
        closed = await conn.begin()
        await closed.aclose()
        failed = await conn.begin()
        assert await anext(failed) == [Text("a")]
        with pytest.raises(UpstreamError):
            await anext(failed)
        assert [[batch async for batch in deltas] for deltas in (closed, failed)] == [[], []]
        await failed.aclose()


FAILURES = {
    "status": json_of({"error": {"message": "No."}}, 400),
    "no response": Reply(raw=HANG_UP),
    "no event": stream_of(HANG_UP),
    "cut off": stream_of(b"data: a\n\n", HANG_UP),
    "unfinished": stream_of(b"data: a\n\n"),
}


@pytest.mark.parametrize("reply", FAILURES.values(), ids=FAILURES)
async def test_failed_answer_leaves_no_garbage(reply: Reply) -> None:
    async with connect(*[reply] * 2, request_retries=0, stream_retries=0) as conn:

        async def fail() -> None:
            with pytest.raises(AntiphonError):
                await conn.ask()

        await fail()  # some parts are made at the first use
        with expect_no_garbage():
            await fail()


@pytest.mark.parametrize("reply", [Reply(raw=STALL), stream_of(STALL), stream_of(b": alive\n\n", STALL)])
async def test_cancelling_before_first_delta_closes_the_connection(reply: Reply) -> None:
    async with connect(reply) as conn:
        call = asyncio.create_task(conn.begin())
        await conn.server.until_requests(1)
        call.cancel()
        await conn.server.until_hang_ups()
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
async def test_failure_before_first_delta_is_retried(broken: Reply) -> None:
    async with connect(broken, HELLO) as conn:
        assert flatten(await conn.ask()) == flatten(WORDS)
        assert len(conn.server.requests) == 2
        assert [0.18 <= wait <= 0.22 for wait in conn.waits] == [True]


async def test_request_retries_are_limited_with_growing_waits() -> None:
    async with connect(*[Reply(status=500, body=b"oh")] * 5, HELLO) as conn:
        with pytest.raises(UpstreamError, match=r"^The upstream failed: oh$"):
            await conn.ask()
        assert len(conn.server.requests) == 5
        assert [
            round(wait / base, 1) in (0.9, 1.0, 1.1)
            for wait, base in zip(conn.waits, (0.2, 0.4, 0.8, 1.6), strict=True)
        ] == [True] * 4


async def test_stream_retries_are_counted_separately() -> None:
    async with connect(*[stream_of(HANG_UP)] * 5, *[Reply(status=500)] * 4, HELLO) as conn:
        assert flatten(await conn.ask()) == flatten(WORDS)
        assert len(conn.waits) == 9


async def test_zero_retries_raise_the_first_failure() -> None:
    async with connect(stream_of(HANG_UP), HELLO, stream_retries=0) as conn:
        with pytest.raises(UpstreamError, match="closed before the answer ended"):
            await conn.ask()
        assert conn.waits == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422, 302])
async def test_rejected_request_is_not_retried(status: int) -> None:
    async with connect(Reply(status=status, headers={"Location": "/elsewhere"}), HELLO) as conn:
        with pytest.raises(AntiphonError):
            await conn.ask()
        assert len(conn.server.requests) == 1


@pytest.mark.parametrize("code", ["insufficient_quota", "usage_limit_reached", "usage_not_included"])
async def test_exhausted_quota_is_not_retried(code: str) -> None:
    async with connect(json_of({"error": {"message": "Spent.", "code": code}}, 429), HELLO) as conn:
        with pytest.raises(RateLimited) as raised:
            await conn.ask()
        assert (raised.value.message, raised.value.code) == ("Spent.", code)
        assert len(conn.server.requests) == 1


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
async def test_retry_waits_for_retry_after(reply: Reply, wait: float) -> None:
    async with connect(reply, HELLO) as conn:
        assert flatten(await conn.ask()) == flatten(WORDS)
        assert conn.waits == [pytest.approx(wait)]


async def test_long_retry_after_is_passed_on() -> None:
    async with connect(Reply(status=429, headers={"Retry-After": "61"}), HELLO) as conn:
        with pytest.raises(RateLimited) as raised:
            await conn.ask()
        assert (raised.value.retry_after, conn.waits) == (61.0, [])


@pytest.mark.parametrize("end", [RESET, HANG_UP, Raw(b"no chunk\r\n"), Raw(b"0\r\n\r\n")])
async def test_failure_after_first_delta_is_not_retried(end: Any) -> None:
    more = asyncio.Event()
    async with connect(stream_of(b"data: a\n\n", more, end), HELLO) as conn:
        deltas = await conn.begin()
        assert await anext(deltas) == [Text("a")]
        more.set()
        with pytest.raises(UpstreamError, match=r"before the answer ended|The upstream closed the connection"):
            await anext(deltas)
        assert len(conn.server.requests) == 1
        assert conn.upstream.error_counts == {"server_error": 1}


async def test_failed_attempts_are_counted_by_kind() -> None:
    replies = [
        Reply(status=500),
        Reply(status=429, headers={"Retry-After": "1"}),
        stream_of(HANG_UP),
        HELLO,
        Reply(status=400),
        Reply(status=401),
        Reply(status=404),
    ]
    async with connect(*replies) as conn:
        await conn.ask()
        before = dict(conn.upstream.error_counts)
        for _ in range(2):
            with pytest.raises(AntiphonError):
                await conn.ask()
        with pytest.raises(AntiphonError):
            await conn.upstream.get_json("/models")
        assert (before, conn.upstream.error_counts) == (
            {"server_error": 2, "rate_limited": 1},
            {"server_error": 2, "rate_limited": 1, "rejected": 3},
        )


async def test_json_body_is_read_completely() -> None:
    async with connect(json_of({"a": 1}), stream_retries=0) as conn:
        with pytest.raises(UpstreamError, match="before the answer ended"):  # this dialect has an end, the body has not
            await conn.ask()


async def test_error_with_status_200_is_raised() -> None:
    async with connect(json_of({"error": {"message": "No.", "type": "invalid_request_error", "param": "x"}})) as conn:
        with pytest.raises(InvalidRequest, match=r"^No\.$") as raised:
            await conn.ask()
        assert raised.value.param == "x"


async def test_web_page_is_an_error() -> None:
    async with connect(Reply(body=b"\n<!doctype html><title>Welcome!</title>")) as conn:
        with pytest.raises(UpstreamError, match=r"web page.*Welcome!"):
            await conn.ask()
        assert len(conn.server.requests) == 1


async def test_keepalives_do_not_extend_first_token_timeout() -> None:
    async with connect(stream_of(b": alive\n\n", STALL), first_token_timeout=AT_ONCE, stream_retries=0) as conn:
        with pytest.raises(UpstreamTimeout, match="did not answer in time"):
            await conn.ask()
        await conn.server.until_hang_ups()


async def test_first_token_timeout_is_retried() -> None:
    async with connect(Reply(raw=STALL), HELLO, first_token_timeout=2 * AT_ONCE) as conn:
        assert flatten(await conn.ask()) == flatten(WORDS)


async def test_idle_connection_ends_the_answer() -> None:
    async with connect(stream_of(b"data: a\n\n", STALL), idle_timeout=AT_ONCE) as conn:
        deltas = await conn.begin()
        assert await anext(deltas) == [Text("a")]
        with pytest.raises(UpstreamTimeout, match="stopped sending"):
            await anext(deltas)
        await conn.server.until_hang_ups()


async def test_calls_over_the_limit_wait_in_order() -> None:
    async with connect(*[stream_of(b"data: a\n\n", STALL)] * 3, max_concurrent=1) as conn:
        first = await conn.begin("/first")
        second, third, fourth = (asyncio.create_task(conn.begin(path)) for path in ("/second", "/third", "/fourth"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait({second})
        await first.aclose()
        await (await third).aclose()
        await (await fourth).aclose()
        assert [request.path for request in conn.server.requests] == ["/v1/first", "/v1/third", "/v1/fourth"]


async def test_projects_take_turns_and_background_calls_wait_longest() -> None:
    async with connect(*[HELLO] * 5, max_concurrent=1) as conn:
        first = await conn.begin("/first")

        async def call(path: str, project: str, *, background: bool = False) -> None:
            deltas = await conn.upstream.stream(path, b"{}", WordReader, project=project, background=background)
            assert flatten([batch async for batch in deltas]) == flatten(WORDS)

        waiting = [
            asyncio.create_task(call("/background", "b", background=True)),
            asyncio.create_task(call("/a1", "a")),
            asyncio.create_task(call("/a2", "a")),
            asyncio.create_task(call("/b", "b")),
        ]
        await asyncio.sleep(0)
        await first.aclose()
        await asyncio.gather(*waiting)
        paths = [request.path for request in conn.server.requests]
        assert paths == ["/v1/first", "/v1/a1", "/v1/b", "/v1/a2", "/v1/background"]


async def test_failing_upstream_is_paused_then_tried() -> None:
    async with connect(*[Reply(status=500)] * 6, HELLO, HELLO, request_retries=0) as conn:
        for number in range(5):
            with pytest.raises(UpstreamError):
                await conn.begin(body=b"%d" % number)
        with pytest.raises(Unavailable, match="paused") as raised:
            await conn.ask()
        assert (raised.value.retry_after, len(conn.server.requests)) == (10.0, 5)
        conn.time += 10
        with pytest.raises(UpstreamError):
            await conn.ask()
        conn.time += 19
        with pytest.raises(Unavailable):
            await conn.ask()
        conn.time += 1
        assert [flatten(await conn.ask()) for _ in range(2)] == [flatten(WORDS)] * 2


async def test_get_json_returns_the_body() -> None:
    async with connect(json_of({"data": []})) as conn:
        assert await conn.upstream.get_json("/models") == {"data": []}
        assert (conn.server.requests[0].method, conn.server.requests[0].path) == ("GET", "/v1/models")


async def test_get_json_is_not_retried() -> None:
    async with connect(Reply(status=500), Reply(body=b"text")) as conn:
        with pytest.raises(UpstreamError):
            await conn.upstream.get_json("/models")
        with pytest.raises(UpstreamError, match="not JSON"):
            await conn.upstream.get_json("/models")
        assert len(conn.server.requests) == 2


async def test_post_json_is_retried() -> None:
    async with connect(Reply(status=500), Reply(raw=RESET), json_of({"tokens": 3})) as conn:
        assert json.loads(await conn.upstream.post_json("/count", b"{}")) == {"tokens": 3}
        assert len(conn.server.requests) == 3


async def test_errors_and_log_hide_keys_and_addresses(caplog: pytest.LogCaptureFixture) -> None:
    async with connect(request_retries=1) as conn:
        port = conn.server.port
        message = f"Bad key sk-upstream-0123456789 for http://127.0.0.1:{port}/v1/chat, or 127.0.0.1:{port}."
        conn.server.add(json_of({"error": {"message": message}}, 500), json_of({"error": {"message": message}}, 401))
        with caplog.at_level(logging.DEBUG, logger="antiphon"), pytest.raises(UpstreamError) as raised:
            await conn.ask()
    texts = [raised.value.message, caplog.text]
    assert [secret for secret in ("0123456789", str(port), "127.0.0.1") for text in texts if secret in text] == []
    assert "backend there: " in caplog.text


async def test_closed_client_raises() -> None:
    async with connect() as conn:
        await conn.upstream.close()
        with pytest.raises(UpstreamError, match="closed"):
            await conn.ask()
        assert conn.waits == []


async def test_closing_the_client_ends_running_streams() -> None:
    async with connect(stream_of(b"data: a\n\n", STALL), stream_of(STALL)) as conn:
        deltas = await conn.begin()
        assert await anext(deltas) == [Text("a")]
        waiting = asyncio.create_task(conn.begin())
        await conn.server.until_requests(2)
        await conn.upstream.close()
        await conn.server.until_hang_ups(2)
        with pytest.raises(UpstreamError):
            await anext(deltas)
        with pytest.raises(UpstreamError):
            await waiting
