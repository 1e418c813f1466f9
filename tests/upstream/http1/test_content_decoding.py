import gzip
import zlib

import pytest

from antiphon.errors import UpstreamError
from antiphon.upstream.http1.content_decoding import MAX_DECODED_SIZE, ContentDecoder
from antiphon.upstream.http1.errors import IncompleteBody
from support.raw_server import count_used_connections, fetch, fetch_once, open_session, read_all, reply, serve_raw

TEXT = b"some words, " * 500


def pack(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def deflate_raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def make_answer(encoding: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


BODIES = [
    ("gzip", pack(TEXT)),
    ("GZIP", pack(TEXT)),
    ("x-gzip", pack(TEXT)),
    ("gzip", pack(TEXT[:100]) + pack(TEXT[100:])),
    ("deflate", zlib.compress(TEXT)),
    ("deflate", deflate_raw(TEXT)),
    ("identity", TEXT),
    ("", TEXT),
    ("unheard-of", TEXT),
]


@pytest.mark.parametrize(("encoding", "body"), BODIES)
async def test_compressed_body_is_decoded(encoding: str, body: bytes) -> None:
    assert await fetch_once(reply(make_answer(encoding, body))) == TEXT


@pytest.mark.parametrize(("encoding", "body"), BODIES[:6])
async def test_compressed_body_split_at_every_byte_is_decoded(encoding: str, body: bytes) -> None:
    answer = make_answer(encoding, body)
    assert await fetch_once(reply(*(answer[at : at + 1] for at in range(len(answer))))) == TEXT


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", pack(TEXT)[:-1]),
        ("gzip", pack(TEXT)[:5]),
        ("gzip", b"not compressed"),
        ("gzip", pack(TEXT) + b"more"),
        ("deflate", zlib.compress(TEXT)[:-1]),
        ("deflate", zlib.compress(TEXT) + b"more"),
        ("deflate", b"\xff\xff\xff"),
    ],
)
async def test_damaged_compressed_body_is_an_error(encoding: str, body: bytes) -> None:
    with pytest.raises(UpstreamError, match="closed before the answer ended"):
        await fetch_once(reply(make_answer(encoding, body)))


@pytest.mark.parametrize("encoding", ["br", "zstd"])
async def test_unsupported_encoding_is_an_error(encoding: str) -> None:
    async with serve_raw(reply(make_answer(encoding, b"x"))) as server, open_session(server.url) as session:
        with pytest.raises(UpstreamError, match="not valid HTTP"):
            await fetch(session)
        assert count_used_connections(session) == 0


async def test_empty_compressed_body_is_empty() -> None:
    assert await fetch_once(reply(make_answer("gzip", b""))) == b""


async def test_highly_compressed_body_is_decoded_in_parts() -> None:
    size = 8 * 1024 * 1024
    answer = make_answer("gzip", pack(bytes(size)))
    async with serve_raw(reply(answer)) as server, open_session(server.url) as session:
        response = await session.send("POST", "/chat", b"{}")
        first = await response.read()
        assert len(first) == MAX_DECODED_SIZE
        assert len(await read_all(response)) == size - MAX_DECODED_SIZE


def test_output_that_fills_a_part_exactly_is_complete() -> None:
    for size in (MAX_DECODED_SIZE - 1, MAX_DECODED_SIZE, MAX_DECODED_SIZE + 1, 2 * MAX_DECODED_SIZE):
        decoder = ContentDecoder("gzip")
        decoder.feed(pack(bytes(size)))
        total = 0
        while part := decoder.take():
            total += len(part)
        decoder.check_end()
        assert total == size


def test_end_within_compressed_data_is_an_error() -> None:
    decoder = ContentDecoder("gzip")
    decoder.feed(pack(TEXT)[:20])
    decoder.take()
    with pytest.raises(IncompleteBody):
        decoder.check_end()
