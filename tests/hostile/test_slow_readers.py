"""Clients that request large stored bodies and do not read them."""

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest

from support.loop_blocks import MAX_BLOCK
from support.victim import TIMEOUT, Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

StartVictim = Callable[..., Victim]
MB = 1024 * 1024
REQUEST = {"model": "scripted", "input": "hi"}
# The kernel takes several megabytes of a body that nobody reads.
SIZE = 7 * MB
LIMITS = {"max_body_bytes": 16 * MB, "body_budget_bytes": 32 * MB}


def store_responses(server: Victim, number: int, *, instructions: int = SIZE, text: int = SIZE) -> list[str]:
    """Return the paths of different stored responses."""
    paths = []
    for index in range(number):
        request = REQUEST | {"instructions": f"{index} " + "x" * instructions, "input": "y" * text}
        response = server.ask("POST", "/v1/responses", request)
        assert response.status == 200, response.json
        paths.append(f"/v1/responses/{response.json['id']}")
    return paths


def start_reading(server: Victim, stack: ExitStack, path: str) -> socket.socket:
    """Request a body and read the start of its head only."""
    client = stack.enter_context(server.connect())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return client


def read_statuses(clients: Sequence[socket.socket]) -> list[bytes]:
    return [client.recv(12) for client in clients]


def wait_until_free(server: Victim, path: str) -> None:
    """Wait until a large body is sent again: the server has noticed that its clients have gone."""
    ended = time.monotonic() + TIMEOUT
    while (status := server.ask("GET", path).status) != 200:
        assert status == 503
        assert time.monotonic() < ended


def check_many_readers(server: Victim, paths: Sequence[str], *, fitting: int, max_mb: float) -> None:
    """Read nothing of each body. `fitting` is the largest number of them within the budget."""
    small = server.ask("POST", "/v1/responses", REQUEST).json["id"]
    before = server.rss_mb()
    server.reset_peak()
    with ExitStack() as stack:
        clients = [start_reading(server, stack, path) for path in paths]
        assert server.ask("GET", f"/v1/responses/{small}").status == 200, "a small body needs no room"
        statuses = read_statuses(clients)
        assert set(statuses) == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        assert statuses.count(b"HTTP/1.1 200") <= fitting
        refused = clients[statuses.index(b"HTTP/1.1 503")].recv(65536)
        assert b"\r\nretry-after: 5\r\n" in refused
        assert b"body_budget_bytes" in refused
        assert server.ask("POST", "/v1/responses", REQUEST).status == 200
    assert server.peak_mb() < before + max_mb
    assert server.longest_block() < MAX_BLOCK
    for path in paths[-2:]:
        wait_until_free(server, path)


def test_readers_that_read_nothing_stay_within_the_budget(victim: StartVictim) -> None:
    """A page of items has a body of its own for each reader. Few large bodies are loaded at once."""
    server = victim(script={"default": "Hello."}, **LIMITS)
    paths = store_responses(server, 6)
    check_many_readers(
        server, [path + suffix for path in paths for suffix in ("", "/input_items")], fitting=4, max_mb=150
    )


def test_readers_of_large_conversation_items_stay_within_the_budget(victim: StartVictim) -> None:
    server = victim(script={"default": "Hello."}, **LIMITS)
    items = [{"role": "user", "content": "x" * SIZE}]
    created = [server.ask("POST", "/v1/conversations", {"items": items}).json["id"] for _ in range(5)]
    lists = [f"/v1/conversations/{conversation_id}/items" for conversation_id in created]
    item_ids = [server.ask("GET", path).json["data"][0]["id"] for path in lists]
    single = [f"{path}/{item_id}" for path, item_id in zip(lists, item_ids, strict=True)]
    check_many_readers(server, lists + single, fitting=4, max_mb=150)


@pytest.mark.slow
def test_slow_readers_give_way_to_others(victim: StartVictim) -> None:
    server = victim(script={"default": "Hello."}, **LIMITS)
    paths = store_responses(server, 5, text=1)
    with ExitStack() as stack:
        statuses = read_statuses([start_reading(server, stack, path) for path in paths])
        # After 5 seconds they are slow.
        wait_until_free(server, paths[statuses.index(b"HTTP/1.1 503")])
        large = json.dumps(REQUEST | {"input": "z" * SIZE}).encode()
        assert server.ask("POST", "/v1/responses", large).status == 200


@pytest.mark.slow
def test_thirty_readers_of_large_responses_stay_within_the_default_budget(victim: StartVictim) -> None:
    server = victim(script={"default": "Hello."})
    paths = store_responses(server, 30, instructions=20 * MB, text=1)
    # After 5 seconds, slow readers give way to the next.
    check_many_readers(server, paths, fitting=29, max_mb=500)
