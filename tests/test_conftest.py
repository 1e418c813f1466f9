import asyncio
import re
import socket
from pathlib import Path

import pytest


def test_a_connection_to_another_machine_is_refused() -> None:
    with socket.socket() as client, pytest.raises(Exception, match=re.escape("socket.connect to 192.0.2.1")):
        client.connect(("192.0.2.1", 80))


def test_a_datagram_to_another_machine_is_refused() -> None:
    with (
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as client,
        pytest.raises(Exception, match=re.escape("socket.sendto to 2001:db8::1")),
    ):
        client.sendto(b"hello", ("2001:db8::1", 53))


async def test_a_name_is_not_looked_up() -> None:
    with pytest.raises(Exception, match=re.escape("socket.getaddrinfo of api.example.com")):
        await asyncio.open_connection("api.example.com", 443)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_loopback_connections_pass(host: str) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(greet, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(host, port)
        assert await reader.read() == b"hello"
        writer.close()
        await writer.wait_closed()


def test_unix_sockets_pass(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        client.connect(str(tmp_path / "socket"))
        accepted, _ = server.accept()
        accepted.close()
