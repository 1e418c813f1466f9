"""The choice of connections to close."""

import asyncio
from typing import Any

import pytest

from antiphon.server import connections
from antiphon.server.connections import ConnectionTable, find_address_key


class FakeConnection:
    def __init__(self, address: str = "a", order: tuple[bool, float] | None = None) -> None:
        self.address = address
        self.accepted_at = asyncio.get_running_loop().time()
        self.order = order
        self.evicted = False

    def find_eviction_order(self) -> tuple[bool, float] | None:
        return self.order

    def evict(self) -> None:
        self.evicted = True


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GRACE_SECONDS", 0.0)


def make_table(**changes: Any) -> ConnectionTable:
    limits = {"max_total": 100, "max_unauthenticated": 4, "max_per_address": 2, "has_keys": True}
    return ConnectionTable(**limits | changes)


def add(table: ConnectionTable, *addresses: str) -> list[FakeConnection]:
    added = [FakeConnection(address) for address in addresses]
    assert all(table.add(each, ()) for each in added)
    return added


async def wait_for_check() -> None:
    for _ in range(5):
        await asyncio.sleep(0.001)


def find_evicted(added: list[FakeConnection]) -> list[int]:
    return [index for index, each in enumerate(added) if each.evicted]


async def test_oldest_of_an_address_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    table = make_table()
    added = add(table, "a", "b", "a", "a", "a")
    await wait_for_check()
    assert (find_evicted(added), table.unauthenticated) == ([0, 2], 3)
    assert "too many connections: closed 2." in caplog.text
    add(table, "a", "a")
    await wait_for_check()
    assert len(caplog.records) == 1, "one line in a minute"


async def test_address_with_the_most_loses_first() -> None:
    table = make_table(max_per_address=100)
    added = add(table, "b", "a", "a", "a", "c", "a")
    await wait_for_check()
    assert (find_evicted(added), table.unauthenticated) == ([1, 2], 4)


async def test_authenticated_connection_does_not_count() -> None:
    table = make_table()
    added = add(table, "a", "a", "a")
    for _ in range(2):  # also a second time, when it is closed
        table.admit(added[0])
    await wait_for_check()
    assert (find_evicted(added), table.unauthenticated) == ([], 2)


async def test_connection_has_time_to_present_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GRACE_SECONDS", 60.0)
    added = add(make_table(), *"aaaaaaaa")
    await wait_for_check()
    assert find_evicted(added) == []


async def test_upgraded_connection_replaces_its_predecessor() -> None:
    table = make_table()
    first, second = add(table, "a")[0], FakeConnection()
    table.replace(first, second)
    table.admit(first)
    assert table.unauthenticated == 1
    table.admit(second)
    table.replace(first, second)
    assert table.unauthenticated == 0


async def test_idle_connections_are_closed_for_a_new_one() -> None:
    table = make_table(max_total=3)
    orders = [(True, 1.0), None, (False, 5.0), (False, 3.0)]
    added = [FakeConnection(order=order) for order in orders]
    newcomer = FakeConnection(order=(False, 0.0))
    assert table.add(newcomer, [*added, newcomer])
    assert (find_evicted(added), newcomer.evicted) == ([3], False)


async def test_new_connection_is_refused_if_all_others_are_served() -> None:
    newcomer = FakeConnection(order=(False, 0.0))
    served = [FakeConnection() for _ in range(3)]
    assert not make_table(max_total=3).add(newcomer, [*served, newcomer])
    assert find_evicted(served) == []


@pytest.mark.parametrize(
    ("addresses", "same"),
    [
        (("10.0.0.1", "10.0.0.1"), True),
        (("10.0.0.1", "10.0.0.2"), False),
        (("2001:db8::1", "2001:db8::ffff:1"), True),
        (("2001:db8::1", "2001:db8:0:1::1"), False),
        (("::ffff:10.0.0.1", "::ffff:10.0.0.2"), False),
        (("::ffff:10.0.0.1", "10.0.0.1"), True),
        (("fe80::1%eth0", "fe80::2%eth0"), True),
        (("not:an:address", "not:another"), False),
    ],
)
def test_addresses_of_one_client_have_one_key(addresses: tuple[str, str], same: bool) -> None:
    first, second = (find_address_key((address, 80)) for address in addresses)
    assert (first == second) == same
    assert find_address_key(None) == ""
