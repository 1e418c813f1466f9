"""Rules for every test: no network but this machine's own, and hypothesis settings that do not depend on its speed."""

import gc
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings


class NetworkRefused(Exception):
    """A test reached for another machine. Not an OSError: the code under test must not take it for a failed call."""


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: the interpreter calls it before the act, whichever library the call comes from."""
    if event in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        peer, address = arguments
        if peer.family in {socket.AF_INET, socket.AF_INET6} and address and not is_local(address[0]):
            raise NetworkRefused(f"{event} to {address[0]}: tests talk to loopback addresses and unix sockets only")
    elif event in {"socket.getaddrinfo", "socket.gethostbyname"}:
        host = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
        if host and host != "localhost" and not is_address(host):
            raise NetworkRefused(f"{event} of {host}: tests resolve no names but localhost")


sys.addaudithook(refuse_network)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end: the garbage collector need not go through it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: a good part of the time, a test waits for a process or for a moment."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (processors or 1) + 1


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """A command that is run within a test sends the log to a stream that is closed after it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


settings.register_profile("everywhere", deadline=None)
settings.register_profile("ci", settings.get_profile("everywhere"), derandomize=True, print_blob=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "everywhere")
