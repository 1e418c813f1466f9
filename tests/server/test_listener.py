"""The socket that a server listens on: its address, and the connections that wait when it closes."""

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from antiphon.config.settings import Settings
from antiphon.errors import ConfigError
from antiphon.server.listener import accept_waiting, bind_socket, format_url

TIMEOUT = 60


def make_settings(port: int = 0) -> Settings:
    return Settings(data_dir=Path(), store="memory:", port=port)


def test_port_in_use_is_reported() -> None:
    with bind_socket(make_settings()) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert format_url(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"Port {port} on 127.0.0.1 is in use"):
            bind_socket(make_settings(port))


@pytest.mark.parametrize("are_shared", [True, False])
async def test_connections_that_wait_are_served_although_the_listener_closes(are_shared: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1))
        writer.close()

    with bind_socket(make_settings()) as listener, ExitStack() as stack:
        server = await asyncio.start_server(answer, sock=listener)
        clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(50)]
        for client in clients:  # the event loop has accepted none of them
            client.sendall(b"x")
        await accept_waiting([listener], are_shared=are_shared)
        server.close()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT):
            for client in clients:
                client.setblocking(False)
                assert await loop.sock_recv(client, 9) == b"x"
