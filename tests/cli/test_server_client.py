"""The client for a running server, against faulty replies on a real socket."""

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from antiphon.cli.server_client import ServerClient
from antiphon.errors import AntiphonError
from antiphon.protocol.events import OutputTextDelta
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown

REQUEST = CreateRequest(model="m", input="hi", stream=True)
CLOSED = "The connection to URL was lost: the server closed the connection."
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def as_chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def read_request(connection: socket.socket) -> bytes:
    """Read the whole request: closing a socket with unread data resets the connection."""
    with connection.makefile("rb") as file:
        lines = list(itertools.takewhile(bytes.strip, file))
        lengths = [int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length:")]
        return b"".join(lines) + b"\r\n" + file.read(sum(lengths))


@contextmanager
def answering(reply: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Serve one connection with this reply and close it. Yields the URL and the list of received requests."""
    received: list[bytes] = []

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            received.append(read_request(connection))
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", received
        thread.join()


def test_events_are_decoded_across_chunk_boundaries():
    delta = (
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,'
        b'"item_id":"msg_1","output_index":0,"content_index":0,"delta":"Hi"}\n\n'
    )
    body = delta + b'data: {"type":"new.event"}\n\n' + b"data: [DONE]\n\n"
    with answering(STREAM + as_chunk(body[:50]) + as_chunk(body[50:]) + b"0\r\n\r\n") as (url, received):
        assert list(ServerClient(f"{url}/v1", key="k").stream(REQUEST)) == [
            OutputTextDelta(
                sequence_number=4, item_id="msg_1", output_index=0, content_index=0, delta="Hi", logprobs=[]
            ),
            Unknown(b'{"type":"new.event"}'),
        ]
    assert received[0].startswith(b"POST /v1/responses HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in received[0]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            STREAM + as_chunk(b'data: {"type":"new.event"}\n\n'),
            "The connection to URL was lost: the server closed the connection.",
        ),
        (STREAM + as_chunk(b"data: nonsense\n\n"), "The connection to URL was lost: JSON is malformed: "),
        (b"", CLOSED),
        (b"SSH-2.0-server\r\n", "The connection to URL was lost: SSH-2.0-server"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\noops", "The server returned 502 Bad Gateway."),
        (
            b'HTTP/1.1 400 Bad Request\r\nContent-Length: 34\r\n\r\n{"error": {"message": "Not that."}}',
            "The server returned 400 Bad Request.",
        ),
        (
            b'HTTP/1.1 400 Bad Request\r\nContent-Length: 35\r\n\r\n{"error": {"message": "Not that."}}',
            "Not that.",
        ),
    ],
)
def test_failure_of_the_server_is_described(reply, message):
    with answering(reply) as (url, _), pytest.raises(AntiphonError) as raised:
        list(ServerClient(url).stream(REQUEST))
    assert raised.value.message.replace(url, "URL").startswith(message)


def test_reply_that_is_no_model_list_is_an_error():
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>"
    with answering(reply) as (url, _), pytest.raises(AntiphonError, match=r"Is it an API server\?"):
        ServerClient(url).models()


def test_password_of_the_url_is_in_no_error():
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>"
    with answering(reply) as (url, _):
        for address in (url, "http://127.0.0.1:1", "http://127.0.0.1:port", "ftp://127.0.0.1"):
            with pytest.raises(AntiphonError) as raised:
                ServerClient(address.replace("://", "://ada:pass-1@")).models()
            assert address.replace("://", "://ada:***@") in raised.value.message


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8484", "ftp://127.0.0.1", "http://", "http://127.0.0.1:port", "http://[::1"]
)
def test_invalid_url_is_rejected(url):
    with pytest.raises(AntiphonError, match="is not a valid server URL: use http://HOST:PORT"):
        ServerClient(url)
