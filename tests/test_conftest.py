import asyncio
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def test_connection_to_another_machine_is_refused() -> None:
    with socket.socket() as client, pytest.raises(Exception, match=re.escape("socket.connect to 192.0.2.1")):
        client.connect(("192.0.2.1", 80))


def test_datagram_to_another_machine_is_refused() -> None:
    with (
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as client,
        pytest.raises(Exception, match=re.escape("socket.sendto to 2001:db8::1")),
    ):
        client.sendto(b"hello", ("2001:db8::1", 53))


async def test_name_lookup_is_refused() -> None:
    with pytest.raises(Exception, match=re.escape("socket.getaddrinfo of api.example.com")):
        await asyncio.open_connection("api.example.com", 443)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_loopback_connection_is_allowed(host: str) -> None:
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


def test_unix_socket_is_allowed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        client.connect(str(tmp_path / "socket"))
        accepted, _ = server.accept()
        accepted.close()


def test_child_process_is_interrupted_by_sigint() -> None:
    code = "import time; print('ready', flush=True); time.sleep(30)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors


def test_child_process_is_interrupted_when_pytest_runs_in_the_background() -> None:
    test = f"{__file__}::{test_child_process_is_interrupted_by_sigint.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    background = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    done = subprocess.run(background, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
