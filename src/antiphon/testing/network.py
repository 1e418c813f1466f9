"""A guard for tests: whoever reaches for the network is stopped, and told so."""

import functools
import ipaddress
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NetworkRefused(AssertionError):
    """Something reached for the network. Not an OSError: the code under test must not take it for a failed call."""


_guards: list[bool] = []  # for each one that is up: whether it lets through what stays on this machine


@contextmanager
def forbid_network(*, loopback: bool = True) -> Iterator[None]:
    """Refuse every connection and every look-up of a name, in all threads, as long as this lasts.

    `loopback` lets through what stays on this machine. Unix sockets are never refused. As a fixture:

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
    """An audit hook cannot be taken away again, so there is one, which does nothing while no guard is up."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The interpreter calls this before the act, whichever library the call comes from."""
    if not _guards or not event.startswith("socket."):
        return
    if event in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        peer, address = arguments
        if peer.family in {socket.AF_INET, socket.AF_INET6} and address:
            _check(f"{event} to {address[0]}", local=_is_local(address[0]))
    elif event in {"socket.getaddrinfo", "socket.gethostbyname"}:
        host = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
        if host and not _is_address(host):
            _check(f"{event} of {host}", local=host == "localhost")


def _check(act: str, *, local: bool) -> None:
    if not local:
        raise NetworkRefused(f"{act}: the network is forbidden here")
    if not all(_guards):
        raise NetworkRefused(f"{act}: the network is forbidden here, this machine's own too")


def _is_local(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
