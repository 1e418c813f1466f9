"""The last request of a connection: the server announces in its response that it closes the connection, and does so."""

import json
from typing import Any

import pytest

Json = dict[str, Any]
LAST = {
    "close": ("HTTP/1.1", "Connection: close\r\n"),
    "close in capitals": ("HTTP/1.1", "CONNECTION: Close\r\n"),
    "close in a list": ("HTTP/1.1", "Connection: TE, close\r\nTE: trailers\r\n"),
    "HTTP/1.0": ("HTTP/1.0", ""),
    "HTTP/1.0 with keep-alive": ("HTTP/1.0", "Connection: keep-alive\r\n"),
}
CREATE = "POST /v1/responses"
# The request, its body, and the status and the end of the response.
REQUESTS: dict[str, tuple[str, Any, int, bytes]] = {
    "GET": ("GET /healthz", None, 200, b'{"status":"ok"}'),
    "HEAD": ("HEAD /healthz", None, 200, b""),
    "response": (CREATE, {"input": "hi"}, 200, b"}"),
    "stream": (CREATE, {"input": "hi", "stream": True}, 200, b"data: [DONE]\n\n"),
    "failed stream": (CREATE, {"input": "fail later", "stream": True}, 200, b"data: [DONE]\n\n"),
    "background": (CREATE, {"input": "hi", "background": True}, 200, b"}"),
    "failed response": (CREATE, {"input": "fail later"}, 200, b"}"),
    "refusal of the model": (CREATE, {"input": "refuse", "stream": True}, 400, b"}"),
    "crash": (CREATE, {"input": "crash"}, 500, b"}"),
    "invalid value": (CREATE, {"input": "hi", "temperature": 3}, 400, b"}"),
    "unknown path": ("POST /nowhere", {}, 404, b"}"),
    "unknown method": ("PUT /v1/responses", {}, 405, b"}"),
}


def make_request(line: str, version: str, headers: str, body: Any) -> bytes:
    content = b"" if body is None else json.dumps({"model": "scripted"} | body).encode()
    length = "" if body is None else f"Content-Length: {len(content)}\r\n"
    return f"{line} {version}\r\nHost: localhost\r\n{headers}{length}\r\n".encode() + content


def exchange(server: Any, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return the status, the headers and the body of a response that the end of the connection follows."""
    received = b""
    with server.connect() as client:
        client.sendall(request)
        while part := client.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert len(headers) == len(lines)
    return int(status.split()[1]), headers, body


def join_chunks(body: bytes) -> bytes:
    joined = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        joined += body[:length]
        assert body[length : length + 2] == b"\r\n"
        body = body[length + 2 :]
        if length == 0:
            assert body == b""
            return joined


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("name", REQUESTS)
def test_last_response_announces_the_close_and_the_connection_closes(server: Any, name: str, last: str) -> None:
    line, body, expected, end = REQUESTS[name]
    status, headers, received = exchange(server, make_request(line, *LAST[last], body))
    assert (status, headers["connection"]) == (expected, "close")
    if "content-length" in headers:
        assert len(received) == (0 if name == "HEAD" else int(headers["content-length"]))
    elif LAST[last][0] == "HTTP/1.1":
        received = join_chunks(received)
    else:
        assert "transfer-encoding" not in headers
    assert received.endswith(end)


@pytest.mark.parametrize("last", LAST)
def test_last_follower_of_a_background_response_gets_all_events(server: Any, last: str) -> None:
    created = exchange(server, make_request(CREATE, *LAST[last], {"input": "hi", "background": True, "stream": True}))
    stream = join_chunks(created[2]) if "transfer-encoding" in created[1] else created[2]
    first = json.loads(stream.partition(b"data: ")[2].partition(b"\n")[0])
    line = f"GET /v1/responses/{first['response']['id']}?stream=true"
    status, headers, received = exchange(server, make_request(line, *LAST[last], None))
    followed = join_chunks(received) if "transfer-encoding" in headers else received
    assert (status, headers["connection"], followed) == (200, "close", stream)


@pytest.mark.parametrize("last", LAST)
def test_invalid_request_line_or_header_closes_the_connection(server: Any, last: str) -> None:
    request = make_request("GET /healthz", LAST[last][0], "bad header\r\n" + LAST[last][1], None)
    status, headers, received = exchange(server, request)
    assert (status, headers["connection"]) == (400, "close")
    assert json.loads(received)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("last", LAST)
def test_unauthorized_last_request_closes_the_connection(guarded: Any, last: str) -> None:
    status, headers, received = exchange(guarded, make_request(CREATE, *LAST[last], {"input": "hi"}))
    assert (status, headers["connection"]) == (401, "close")
    assert json.loads(received)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("last", LAST)
def test_too_large_body_of_the_last_request_closes_the_connection(guarded: Any, last: str) -> None:
    headers = "Authorization: Bearer sk-ada\r\n" + LAST[last][1]
    status, received, _ = exchange(guarded, make_request(CREATE, LAST[last][0], headers, {"input": "x" * 2000}))
    assert (status, received["connection"]) == (413, "close")


def test_request_before_the_last_one_keeps_the_connection(server: Any) -> None:
    """The responses to both are read by their lengths, and only the last one announces the close."""
    first = make_request("GET /healthz", "HTTP/1.1", "", None)
    with server.connect() as client:
        client.sendall(first + make_request("GET /healthz", *LAST["close"], None))
        received = b""
        while part := client.recv(65536):
            received += part
    before, _, after = received.partition(b'{"status":"ok"}')
    assert (before.count(b"200 OK"), after.count(b"200 OK"), after.endswith(b'{"status":"ok"}')) == (1, 1, True)
    assert (b"connection:" in before.lower(), b"connection: close" in after.lower()) == (False, True)
