"""The transport over HTTP: what is sent again, and what is received of a server that does not do what it should."""

import asyncio
import gc
import socket
import warnings
import weakref
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from antiphon import Agent, ConversationSession, WebSocketTransport
from antiphon.agent.transports.base import ResponseCollector
from antiphon.agent.transports.http import HttpTransport
from antiphon.errors import (
    AntiphonError,
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    PreviousResponseNotFound,
    QuotaExceeded,
    RateLimited,
    UpstreamError,
    UpstreamTimeout,
)
from support.idle_clock import count_idle_time
from support.upstream_server import HANG_UP, RESET, STALL, Reply, UpstreamServer, json_of, serve, stream_of

COMPLETED = b'data: {"type":"response.completed","response":{"id":"r","status":"completed","output":[]}}\n\n'
GOOD = stream_of(COMPLETED)
JSON = {"Content-Type": "application/json"}
DEEP = b'{"status":"completed","output":' + b"[" * 100_000


def refuse(status: int, code: str | None = None, **headers: str) -> Reply:
    return json_of({"error": {"message": "No.", "type": "t", "code": code, "param": "input"}}, status, **headers)


class Waits(list[float]):
    async def sleep(self, seconds: float) -> None:
        self.append(seconds)


async def ask(upstream: UpstreamServer, **options: Any) -> dict[str, Any]:
    transport = HttpTransport(upstream.url, **options)
    collector = ResponseCollector()
    try:
        async with aclosing(await transport.stream({"model": "m", "input": "hi"})) as events:
            async for batch in events:
                collector.feed(batch)
    finally:
        await transport.close()
    return collector.finish()


async def test_request_has_key_headers_and_stream_flag() -> None:
    async with serve([GOOD]) as upstream:
        await ask(upstream, api_key="sk-1", headers={"X-Team": "a"})
    (request,) = upstream.requests
    assert (request.method, request.path) == ("POST", "/v1/responses")
    assert request.json == {"model": "m", "input": "hi", "stream": True}
    sent = {name: request.headers[name] for name in ("authorization", "x-team", "accept", "content-type")}
    assert sent == {
        "authorization": "Bearer sk-1",
        "x-team": "a",
        "accept": "text/event-stream",
        "content-type": "application/json",
    }


async def test_authorization_header_replaces_the_key() -> None:
    async with serve([GOOD]) as upstream:
        await ask(upstream, api_key="sk-1", headers={"Authorization": "Basic YQ=="})
    assert upstream.requests[0].headers["authorization"] == "Basic YQ=="


@pytest.mark.parametrize("failure", [refuse(500), refuse(503), refuse(429), Reply(raw=RESET), Reply(raw=b"")])
async def test_transient_errors_are_retried_with_growing_delays(failure: Reply) -> None:
    waits = Waits()
    async with serve([failure, failure, failure, GOOD]) as upstream:
        assert (await ask(upstream, sleep=waits.sleep))["id"] == "r"
    assert [round(seconds / 0.2) for seconds in waits] == [1, 2, 4]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry_After": "2"}, 2.0),
        ({"Retry_After_Ms": "1500"}, 1.5),
        ({"Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"Retry_After": "soon"}, 0.2),
        ({"Retry_After": "nan"}, 0.2),
        ({"Retry_After": "-5"}, 0.2),
    ],
)
async def test_retry_waits_as_long_as_the_server_asks(headers: dict[str, str], seconds: float) -> None:
    waits = Waits()
    async with serve([refuse(429, **headers), GOOD]) as upstream:
        await ask(upstream, sleep=waits.sleep)
    assert waits == [pytest.approx(seconds, rel=0.11)]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (refuse(400), InvalidRequest),
        (refuse(401), InvalidRequest),
        (refuse(404, "previous_response_not_found"), PreviousResponseNotFound),
        (refuse(400, "context_length_exceeded"), ContextLengthExceeded),
        (refuse(429, "insufficient_quota"), QuotaExceeded),
        (refuse(502, "upstream_refused"), UpstreamError),
        (refuse(429, Retry_After="3600"), RateLimited),
    ],
)
async def test_permanent_errors_are_raised_at_once(failure: Reply, kind: type[AntiphonError]) -> None:
    async with serve([failure]) as upstream:
        with pytest.raises(kind, match=r"^No\.$") as raised:
            await ask(upstream)
    assert raised.value.param == "input"
    assert len(upstream.requests) == 1


async def test_retry_after_date_in_an_hour_is_not_waited_for() -> None:
    late = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    async with serve([refuse(429, Retry_After=late)]) as upstream:
        with pytest.raises(RateLimited) as raised:
            await ask(upstream)
    assert raised.value.retry_after == pytest.approx(3600, abs=60)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_is_an_error_and_not_followed(status: int) -> None:
    async with serve([GOOD]) as elsewhere:
        moved = Reply(status=status, headers={"Location": f"{elsewhere.url}/responses"})
        async with serve([moved, GOOD]) as upstream:
            with pytest.raises(UpstreamError) as raised:
                await ask(upstream)
    assert (raised.value.code, raised.value.message) == (
        "upstream_refused",
        f"The upstream answered with a redirect (status {status}): check the base_url.",
    )
    assert (len(upstream.requests), elsewhere.requests) == (1, [])


async def test_last_error_is_raised_after_all_retries() -> None:
    async with serve([refuse(500)] * 3) as upstream:
        with pytest.raises(UpstreamError, match=r"^No\.$"):
            await ask(upstream, retries=2, sleep=Waits().sleep)
    assert len(upstream.requests) == 3


@pytest.mark.parametrize(
    ("reply", "kind", "reason"),
    [
        (
            stream_of(b": hi\n\n", RESET),
            UpstreamError,
            "closed before the answer ended",
        ),
        (
            stream_of(b": hi\n\n", HANG_UP),
            UpstreamError,
            "closed before the answer ended",
        ),
        (stream_of(b": hi\n\n"), UpstreamError, "The stream ended before the response did."),
        (stream_of(b": hi\n\n", STALL), UpstreamTimeout, "The upstream stopped sending before its answer ended."),
        (stream_of(b"data: {oops\n\n"), UpstreamError, "The server sent an event that is not JSON."),
        (Reply(body=b"<html>hello</html>"), UpstreamError, "The stream ended before the response did."),
        (json_of([1]), UpstreamError, "The server sent neither a stream nor a response."),
        (Reply(headers=JSON, body=DEEP), UpstreamError, "The server sent neither a stream nor a response."),
        (
            json_of({"id": "r", "status": "queued", "output": []}),
            UpstreamError,
            "is not finished: its status is queued",
        ),
        (json_of({"id": "r", "status": "in_progress"}), UpstreamError, "is not finished: its status is in_progress"),
    ],
)
async def test_broken_stream_is_not_retried(reply: Reply, kind: Any, reason: str) -> None:
    """The caller may have used a part of the stream."""
    count_idle_time(asyncio.get_running_loop())
    async with serve([reply, GOOD]) as upstream:
        with pytest.raises(kind, match=reason):
            await ask(upstream, idle_timeout=0.05)
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_server_that_does_not_stream_is_supported(status: str) -> None:
    body = {"id": "r", "status": status, "output": [{"type": "message", "role": "assistant", "content": []}]}
    async with serve([json_of(body)]) as upstream:
        assert await ask(upstream) == body


async def test_split_surrogate_pair_is_joined() -> None:
    halves = [
        b'data: {"type":"response.output_text.delta","delta":"\\u%b","item_id":"m","output_index":0,"content_index":0,'
        b'"logprobs":[],"sequence_number":%d}\n\n' % (half, number)
        for number, half in enumerate((b"d83d", b"de00"))
    ]
    async with serve([stream_of(b"".join(halves) + COMPLETED)]) as upstream:
        transport = HttpTransport(upstream.url)
        async with aclosing(await transport.stream({"model": "m", "input": "hi"})) as events:
            received = [event async for batch in events for event in batch]
        await transport.close()
    assert "".join(event.delta for event in received[:-1]) == "\N{GRINNING FACE}"


async def test_unreachable_server_is_an_upstream_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # the port is taken, but nothing listens on it
        port = unused.getsockname()[1]
        transport = HttpTransport(f"http://ada:secret@127.0.0.1:{port}/v1", retries=0)
        with pytest.raises(UpstreamError) as raised:
            await transport.stream({"model": "m"})
        await transport.close()
    address = f"127.0.0.1:{port}"
    assert raised.value.message == f"The server refuses connections: {address}. Is it running, and is base_url right?"


@pytest.mark.parametrize("url", ["nowhere", "", "127.0.0.1:8484/v1", "localhost/v1", "ftp://host/v1"])
def test_base_url_without_http_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"base_url: .* must begin with http:// or https://"):
        HttpTransport(url)


@pytest.mark.parametrize("url", ["http://", "https:///v1", "http://?key=1"])
def test_base_url_without_host_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"base_url: .* has no host"):
        HttpTransport(url)


@pytest.mark.parametrize("url", ["http://host/v1/responses", "http://host/v1/responses/?api-version=1"])
def test_base_url_with_the_endpoint_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"base_url: .* must not include /responses"):
        HttpTransport(url)


@pytest.mark.parametrize(
    "key", ["sk-secret\n", "sk-secret\r\nX-Admin: 1", " sk-secret", "sk-s\u00e9cret", "sk-secret\x00"]
)
@pytest.mark.parametrize(
    "connect",
    [
        lambda key: HttpTransport("http://127.0.0.1/v1", api_key=key),
        lambda key: WebSocketTransport("ws://127.0.0.1/v1", api_key=key),
        lambda key: Agent(model="m", base_url="http://127.0.0.1/v1", api_key=key),
        lambda key: ConversationSession("conv_1", base_url="http://127.0.0.1/v1", api_key=key),
    ],
    ids=["http", "websocket", "agent", "session"],
)
def test_api_key_that_is_no_header_value_is_refused_and_not_shown(connect: Callable[[str], Any], key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        connect(key)
    assert (
        raised.value.message == "api_key: it must be one line of ASCII text, without surrounding spaces or line breaks."
    )


@pytest.mark.parametrize("url", ["http://host:notaport/v1", "http://[bad/v1", "http://127.0.0.1:99999/v1"])
async def test_invalid_base_url_is_an_upstream_error(url: str) -> None:
    transport = HttpTransport(url, retries=0)
    with pytest.raises(UpstreamError, match="The address of the upstream is not a valid URL"):
        await transport.stream({"model": "m"})
    await transport.close()


@pytest.mark.parametrize(("code", "expected"), [(429, "429"), ("two words", "two words"), ("x" * 70, "x" * 70)])
async def test_error_code_of_the_server_is_preserved_in_any_form(code: Any, expected: str) -> None:
    failure = json_of({"error": {"message": "No.", "code": code}}, 400)
    async with serve([failure]) as upstream:
        with pytest.raises(InvalidRequest) as raised:
            await ask(upstream)
    assert raised.value.code == expected


async def test_unanswered_request_is_a_timeout() -> None:
    async with serve([Reply(raw=STALL)]) as upstream:
        with pytest.raises(UpstreamTimeout, match="The upstream did not answer in time"):
            await ask(upstream, idle_timeout=0.1, retries=0)


async def test_closing_the_stream_closes_the_connection() -> None:
    async with serve([stream_of(COMPLETED, STALL)]) as upstream:
        transport = HttpTransport(upstream.url)
        events = await transport.stream({"model": "m"})
        async for _ in events:
            break
        await events.aclose()
        await upstream.until_hang_ups()
        await transport.close()


async def test_stream_ends_without_waiting_for_a_stalled_server() -> None:
    async with serve([stream_of(COMPLETED, STALL), GOOD, GOOD]) as upstream:
        transport = HttpTransport(upstream.url)
        for _ in range(3):
            assert [len(batch) async for batch in await transport.stream({"model": "m"})] == [1]
        await transport.close()
    # One that does say goodbye keeps its connection.
    assert upstream.connections == 2


async def test_transport_works_in_successive_event_loops() -> None:
    async with serve([GOOD, GOOD]) as upstream:
        transport = HttpTransport(upstream.url)

        def use() -> None:
            async def ask_and_close() -> None:
                async for _ in await transport.stream({"model": "m"}):
                    pass
                await transport.close()

            asyncio.run(ask_and_close())

        for _ in range(2):
            await asyncio.to_thread(use)
    assert len(upstream.requests) == 2


@pytest.mark.parametrize("first", [0, 1])
async def test_transport_works_in_concurrent_event_loops(first: int) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    async with serve([stream_of(b": hi\n\n", gate, COMPLETED) for gate in gates]) as upstream:
        transport = HttpTransport(upstream.url, retries=0)

        async def ask_and_close() -> list[int]:
            try:
                return [len(batch) async for batch in await transport.stream({"model": "m"})]
            finally:
                await transport.close()

        asking = []
        for count in (1, 2):
            asking.append(asyncio.ensure_future(asyncio.to_thread(asyncio.run, ask_and_close())))
            await upstream.until_requests(count)
        for index in (first, 1 - first):
            gates[index].set()
            assert await asyncio.wait_for(asking[index], 20) == [1]
    # One that was not closed says so when it goes.
    gc.collect()


async def test_closed_event_loop_is_released() -> None:
    async with serve([GOOD, GOOD]) as upstream:
        transport = HttpTransport(upstream.url)

        async def ask_once() -> "weakref.ref[asyncio.AbstractEventLoop]":
            async for _ in await transport.stream({"model": "m"}):
                pass
            return weakref.ref(asyncio.get_running_loop())

        with warnings.catch_warnings():
            # The session is not closed in that loop.
            warnings.simplefilter("ignore", ResourceWarning)
            ended = await asyncio.to_thread(asyncio.run, ask_once())
            assert ended() is not None
            await ask_once()
            gc.collect()
        assert ended() is None
        await transport.close()


async def test_base_url_query_comes_after_the_path() -> None:
    async with serve([GOOD]) as upstream:
        transport = HttpTransport(f"{upstream.url}/?api-version=preview")
        async with aclosing(await transport.stream({"model": "m", "input": "hi"})) as events:
            assert [batch async for batch in events]
        await transport.close()
    (request,) = upstream.requests
    assert (request.path, request.query) == ("/v1/responses", {"api-version": "preview"})
