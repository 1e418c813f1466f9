from typing import Any

import pytest

from antiphon.errors import RateLimited

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
