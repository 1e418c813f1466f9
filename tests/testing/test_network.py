"""The guard between the code under test and the network. All tests have one already, hence the processes."""

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


def try_in_a_process(act: str) -> str:
    code = f"""
import asyncio, socket, threading, urllib.request
from antiphon.testing.network import NetworkRefused, forbid_network
with forbid_network():
    try:
        {act}
    except NetworkRefused as refused:
        print(refused)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("act", "refusal"),
    [
        ("socket.create_connection(('192.0.2.1', 80))", "socket.connect to 192.0.2.1"),
        ("socket.getaddrinfo('example.org', 80)", "socket.getaddrinfo of example.org"),
        ("socket.gethostbyname('example.org')", "socket.gethostbyname of example.org"),
        ("socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 53))", "socket.sendto to 192.0.2.1"),
        ("urllib.request.urlopen('http://192.0.2.1/')", "socket.connect to 192.0.2.1"),
        ("asyncio.run(asyncio.open_connection('192.0.2.1', 80))", "socket.connect to 192.0.2.1"),
    ],
)
def test_other_machines_are_refused_whoever_asks_for_them(act: str, refusal: str) -> None:
    assert try_in_a_process(act) == f"{refusal}: the network is forbidden here"


def test_this_machine_is_let_through_unless_that_is_forbidden_too(listener: socket.socket) -> None:
    with forbid_network():
        connect(listener)
    with forbid_network(loopback=False), pytest.raises(NetworkRefused, match="this machine's own too"):
        connect(listener)
    with forbid_network(loopback=False), pytest.raises(NetworkRefused):
        socket.getaddrinfo("localhost", 80)


def test_the_strictest_of_several_guards_counts_and_none_is_left_behind(listener: socket.socket) -> None:
    with forbid_network(loopback=False):
        with forbid_network(), pytest.raises(NetworkRefused):
            connect(listener)
        with contextlib.suppress(RuntimeError), forbid_network():
            raise RuntimeError
    connect(listener)


def test_unix_sockets_are_not_the_network() -> None:
    one, other = socket.socketpair()
    with one, other, forbid_network(loopback=False):
        one.sendall(b"hello")
        assert other.recv(5) == b"hello"


@forbid_network(loopback=False)
def test_it_is_a_decorator_as_well() -> None:
    with socket.socket() as client, pytest.raises(NetworkRefused):
        client.connect(("127.0.0.1", 9))
