"""A guard that blocks network access during tests."""

import functools
import ipaddress
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NetworkRefused(AssertionError):
    """A blocked attempt to use the network. Not an OSError, so the code under test does not handle it as a failure."""


# The `loopback` argument of each active guard.
_guards: list[bool] = []


@contextmanager
def forbid_network(*, loopback: bool = True) -> Iterator[None]:
    """Block connections and DNS look-ups in all threads, until the context ends.

    `loopback` allows connections to this machine. Unix sockets are always allowed. As a fixture:

        @pytest.fixture(autouse=True)
        def no_network():
            with forbid_network():
                yield
    """
    _install()
    _guards.append(loopback)
    try:
        yield
    finally:
        _guards.remove(loopback)


@functools.cache
def _install() -> None:
    """Install the audit hook once: it cannot be removed. It does nothing while no guard is active."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise if a guard forbids the operation. The interpreter calls this first, for every library."""
    if not _guards or not event.startswith("socket."):
        return
    if event in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        peer, address = arguments
        if peer.family in {socket.AF_INET, socket.AF_INET6} and address:
            _check(f"{event} to {address[0]}", is_local=_is_local(address[0]))
    elif event in {"socket.getaddrinfo", "socket.gethostbyname"}:
        host = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
        if host and not _is_address(host):
            _check(f"{event} of {host}", is_local=host == "localhost")


def _check(operation: str, *, is_local: bool) -> None:
    if not is_local:
        raise NetworkRefused(f"{operation}: network access is forbidden here")
    if not all(_guards):
        raise NetworkRefused(f"{operation}: network access is forbidden here, also to this machine")


def _is_local(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
