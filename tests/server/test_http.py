import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.errors import AntiphonError, BodyTooLarge, RateLimited
from antiphon.server.http import WATCH_DISCONNECT, ClientDisconnected, DisconnectWatch, HttpRequest, read_body

DISCONNECT = {"type": "http.disconnect"}


def read_headers(message: dict[str, Any]) -> dict[bytes, bytes]:
    return {name: value for name, value in message["headers"] if name != b"openai-processing-ms"}


@pytest.mark.parametrize("name", ["X-Request-Id", "X-Client-Request-Id"])
def test_valid_client_request_id_is_used(make_channel: Any, name: str) -> None:
    assert make_channel().make_request(headers={name: "run-7/step:1"}).id == "run-7/step:1"


@pytest.mark.parametrize("sent", ["", "two words", "x" * 129, "naïve", 'quo"te', "a\nb"])
def test_invalid_client_request_id_is_replaced(make_channel: Any, sent: str) -> None:
    made = make_channel().make_request(headers={"X-Request-Id": sent}).id
    assert made.startswith("req_")
    assert len(made) == 36


def test_generated_request_ids_differ(make_channel: Any) -> None:
    assert make_channel().make_request().id != make_channel().make_request().id


async def test_response_is_a_start_and_one_body(make_channel: Any) -> None:
    channel = make_channel()
    http_request = channel.make_request(headers={"X-Request-Id": "7"})
    await http_request.respond(201, b"{}")
    assert (channel.sent[0]["status"], read_headers(channel.sent[0])) == (
        201,
        {b"x-request-id": b"7", b"content-type": b"application/json", b"content-length": b"2"},
    )
    assert channel.sent[1:] == [{"type": "http.response.body", "body": b"{}", "more_body": False}]
    assert (http_request.status, http_request.bytes_sent) == (201, 2)


@pytest.mark.parametrize(("wait", "header"), [(1.2, b"2"), (0.0, b"0"), (60.0, b"60"), (None, None)])
async def test_temporary_error_has_retry_after(make_channel: Any, wait: float | None, header: bytes | None) -> None:
    channel = make_channel()
    await channel.make_request().respond_error(RateLimited("Later.", retry_after=wait))
    assert (channel.sent[0]["status"], read_headers(channel.sent[0]).get(b"retry-after")) == (429, header)


async def test_head_response_states_the_length_without_the_body(make_channel: Any) -> None:
    channel = make_channel()
    await channel.make_request("HEAD").respond(200, b"{}")
    assert read_headers(channel.sent[0])[b"content-length"] == b"2"
    assert channel.sent[1]["body"] == b""


async def test_stream_starts_with_its_first_chunk(make_channel: Any) -> None:
    channel = make_channel()
    http_request = channel.make_request(headers={"X-Request-Id": "7"})
    await http_request.write(b"one")
    await http_request.finish(b"two")
    assert read_headers(channel.sent[0]) == {
        b"x-request-id": b"7",
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
    }
    assert channel.sent[1:] == [
        {"type": "http.response.body", "body": b"one", "more_body": True},
        {"type": "http.response.body", "body": b"two", "more_body": False},
    ]


async def test_warnings_header_is_escaped_and_truncated(make_channel: Any) -> None:
    channel = make_channel()
    http_request = channel.make_request()
    http_request.warn_ignored(["top_k", "bad\r\nset-cookie: x", "naïve"])
    http_request.warnings.append("y" * 5000)
    await http_request.respond(200, b"{}")
    value = read_headers(channel.sent[0])[b"x-antiphon-warnings"]
    assert value.startswith(b"ignored: top_k, bad\\r\\nset-cookie: x, na\\xefve; yyy")
    assert value.endswith(b"yyy ...")
    assert len(value) == 1024


async def test_no_ignored_fields_is_no_warning(make_channel: Any) -> None:
    http_request = make_channel().make_request()
    http_request.warn_ignored(())
    assert http_request.warnings == []


# The body


def chunk(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_body_chunks_are_joined(make_channel: Any) -> None:
    http_request = make_channel(chunk(b"ab", more=True), chunk(b"", more=True), chunk(b"cd")).make_request()
    assert await read_body(http_request, 4) == b"abcd"


async def test_request_without_a_body_has_an_empty_body(make_channel: Any) -> None:
    assert await read_body(make_channel({"type": "http.request"}).make_request(), 4) == b""


async def test_body_with_too_large_content_length_is_not_read(make_channel: Any) -> None:
    http_request = make_channel().make_request(headers={"Content-Length": "5"})
    with pytest.raises(BodyTooLarge, match="at most 4 bytes"):
        await read_body(http_request, 4)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(b"abcde")],
        [chunk(b"abc", more=True), chunk(b"de")],
        [chunk(b"abc", more=True), chunk(b"de", more=True)],
    ],
)
async def test_growing_body_is_refused_at_the_limit(make_channel: Any, chunks: list[dict[str, Any]]) -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(make_channel(*chunks).make_request(), 4)


async def test_disconnect_while_sending_the_body_is_detected(make_channel: Any) -> None:
    http_request = make_channel(chunk(b"ab", more=True), DISCONNECT).make_request()
    with pytest.raises(ClientDisconnected):
        await read_body(http_request, 4)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-Type": "application/x-www-form-urlencoded"}, "invalid_content_type"),
        ({"Content-Type": "Multipart/form-data; boundary=x"}, "invalid_content_type"),
        ({"Content-Encoding": "zstd"}, "invalid_content_encoding"),
        ({"Content-Length": "-1"}, "invalid_header"),
    ],
)
async def test_body_that_cannot_be_json_is_refused(make_channel: Any, headers: dict[str, str], code: str) -> None:
    with pytest.raises(AntiphonError) as caught:
        await read_body(make_channel().make_request(headers=headers), 4)
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/json; charset=utf-8"])
async def test_json_with_another_content_type_is_accepted(make_channel: Any, kind: str) -> None:
    assert await read_body(make_channel(chunk(b"{}")).make_request(headers={"Content-Type": kind}), 4) == b"{}"


def send_request(server: Any, head: str, body: bytes) -> bytes:
    with server.connect() as client:
        client.sendall(f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode() + body)
        return bytes(client.recv(12))


def test_too_large_content_length_gets_413_before_the_body_is_sent(guarded: Any) -> None:
    head = "Authorization: Bearer sk-ada\r\nExpect: 100-continue\r\nContent-Length: 1001"
    assert send_request(guarded, head, b"") == b"HTTP/1.1 413"


def test_too_large_chunked_body_gets_413_while_it_is_sent(guarded: Any) -> None:
    head = "Authorization: Bearer sk-ada\r\nTransfer-Encoding: chunked"
    assert send_request(guarded, head, b"3e9\r\n" + b" " * 1001 + b"\r\n") == b"HTTP/1.1 413"


def test_client_that_sends_a_too_large_body_can_read_the_error(guarded: Any) -> None:
    answer = guarded.ask("POST", "/v1/responses", b" " * 4_000_000, headers={"Authorization": "Bearer sk-ada"})
    assert (answer.status, answer.json["error"]) == (
        413,
        {
            "message": "The body is too large: this server accepts at most 1000 bytes.",
            "type": "invalid_request_error",
            "param": None,
            "code": "request_too_large",
        },
    )


# The disconnect watch


def wait_forever() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_disconnect_cancels_the_block(make_channel: Any) -> None:
    with (
        pytest.raises(ClientDisconnected),
        DisconnectWatch(make_channel({"type": "http.request"}, DISCONNECT).make_request()),
    ):
        await wait_forever()
    await asyncio.sleep(0)  # the task is no longer cancelled and can wait again


async def test_block_completes_while_the_client_is_connected(make_channel: Any) -> None:
    with DisconnectWatch(make_channel().make_request()):
        await asyncio.sleep(0)


async def test_error_in_the_block_is_raised(make_channel: Any) -> None:
    with pytest.raises(ValueError, match="why"), DisconnectWatch(make_channel().make_request()):
        raise ValueError("why")


async def test_block_that_ignores_cancellation_still_raises_disconnect(make_channel: Any) -> None:
    with pytest.raises(ClientDisconnected), DisconnectWatch(make_channel(DISCONNECT).make_request()):
        try:
            await wait_forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0)


async def test_other_cancellation_is_not_swallowed(make_channel: Any) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        with DisconnectWatch(make_channel().make_request()):
            entered.set()
            await wait_forever()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class DisconnectExtension:
    """The extension of a server that calls a function when the client disconnects."""

    def __init__(self, *, connected: bool = True) -> None:
        self.connected = connected
        self.callback: Callable[[], None] | None = None

    def watch(self, callback: Callable[[], None] | None) -> bool:
        self.callback = callback
        return self.connected

    def make_request(self, channel: Any) -> HttpRequest:
        scope = {"method": "POST", "path": "/", "query_string": b"", "headers": []}
        extensions = {WATCH_DISCONNECT: {"watch": self.watch}}
        return HttpRequest({**scope, "extensions": extensions}, channel.receive, channel.send)


async def test_disconnect_extension_cancels_the_block(make_channel: Any) -> None:
    extension = DisconnectExtension()
    with pytest.raises(ClientDisconnected), DisconnectWatch(extension.make_request(make_channel())):
        assert extension.callback is not None
        asyncio.get_running_loop().call_soon(extension.callback)
        await wait_forever()
    assert extension.callback is None
    await asyncio.sleep(0)  # the task is no longer cancelled and can wait again


async def test_disconnect_before_the_block_skips_it(make_channel: Any) -> None:
    extension = DisconnectExtension(connected=False)
    with pytest.raises(ClientDisconnected), DisconnectWatch(extension.make_request(make_channel())):
        pytest.fail("the block was entered")
