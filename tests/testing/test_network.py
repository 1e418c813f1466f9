"""The network guard. All tests already run under one, so some tests use a process of their own."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from antiphon.testing.network import NetworkRefused, forbid_network


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connect(listener: socket.socket) -> None:
    with socket.socket() as client:
        client.connect(listener.getsockname())


def run_in_process(statement: str) -> str:
    code = f"""
import asyncio, socket, threading, urllib.request
from antiphon.testing.network import NetworkRefused, forbid_network
with forbid_network():
    try:
        {statement}
    except NetworkRefused as refused:
        print(refused)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("statement", "operation"),
    [
        ("socket.create_connection(('192.0.2.1', 80))", "socket.connect to 192.0.2.1"),
        ("socket.getaddrinfo('example.org', 80)", "socket.getaddrinfo of example.org"),
        ("socket.gethostbyname('example.org')", "socket.gethostbyname of example.org"),
        ("socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 53))", "socket.sendto to 192.0.2.1"),
        ("urllib.request.urlopen('http://192.0.2.1/')", "socket.connect to 192.0.2.1"),
        ("asyncio.run(asyncio.open_connection('192.0.2.1', 80))", "socket.connect to 192.0.2.1"),
    ],
)
def test_other_machines_are_blocked_in_every_library(statement: str, operation: str) -> None:
    assert run_in_process(statement) == f"{operation}: network access is forbidden here"


def test_loopback_is_allowed_unless_forbidden(listener: socket.socket) -> None:
    with forbid_network():
        connect(listener)
    with forbid_network(loopback=False), pytest.raises(NetworkRefused, match="also to this machine"):
        connect(listener)
    with forbid_network(loopback=False), pytest.raises(NetworkRefused):
        socket.getaddrinfo("localhost", 80)


def test_strictest_guard_applies_until_it_ends(listener: socket.socket) -> None:
    with forbid_network(loopback=False):
        with forbid_network(), pytest.raises(NetworkRefused):
            connect(listener)
        with contextlib.suppress(RuntimeError), forbid_network():
            raise RuntimeError
    connect(listener)


def test_unix_sockets_are_allowed() -> None:
    one, other = socket.socketpair()
    with one, other, forbid_network(loopback=False):
        one.sendall(b"hello")
        assert other.recv(5) == b"hello"


@forbid_network(loopback=False)
def test_forbid_network_works_as_decorator() -> None:
    with socket.socket() as client, pytest.raises(NetworkRefused):
        client.connect(("127.0.0.1", 9))
