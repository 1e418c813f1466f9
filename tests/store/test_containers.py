"""Containers and their files, in the stores that have them."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.errors import InvalidRequest
from antiphon.store.containers import (
    ContainerFileRow,
    ContainerLimitReached,
    ContainerLimits,
    ContainerRow,
    ContainerStore,
)
from antiphon.store.location import locate_containers, locate_store

LIMITS = ContainerLimits(containers=3, container_files=3, container_bytes=100, project_bytes=150)
START = 1_700_000_000


class Clock:
    time = START

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[ContainerStore]:
    urls = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/store.db"}
    url = urls.get(request.param) or request.getfixturevalue("postgres_url")
    opened = locate_store(url, now=clock)
    await opened.open()
    assert isinstance(opened, ContainerStore)
    yield opened
    await opened.close()


def make_row(container_id: str = "cntr_1", **fields: Any) -> ContainerRow:
    defaults = {"name": "work", "created_at": START, "last_active_at": START, "idle_seconds": 60, "memory_limit": "1g"}
    return ContainerRow(id=container_id, **(defaults | fields))


def make_file(file_id: str = "cfile_1", *, path: str = "", size: int = 10, **fields: Any) -> ContainerFileRow:
    defaults = {"container_id": "cntr_1", "source": "user", "created_at": START, "modified_ns": 1}
    return ContainerFileRow(id=file_id, path=path or f"{file_id}.txt", bytes=size, **(defaults | fields))


async def find_limit(call: Callable[[], Any]) -> str:
    with pytest.raises(ContainerLimitReached) as error:
        await call()
    return error.value.limit


async def test_container_is_loaded_as_it_was_saved(store: ContainerStore) -> None:
    row = make_row(interpreter="abc")
    await store.create_container("p", row, limits=LIMITS)
    assert await store.load_container("p", "cntr_1") == row
    assert await store.load_container("other", "cntr_1") is None


async def test_touch_extends_the_life_until_the_container_expires(store: ContainerStore, clock: Clock) -> None:
    await store.create_container("p", make_row(), limits=LIMITS)
    clock.time = START + 59
    touched = await store.touch_container("p", "cntr_1")
    assert touched == make_row(last_active_at=START + 59)
    clock.time = START + 59 + 60
    assert await store.touch_container("p", "cntr_1") == touched
    assert touched is not None
    assert touched.has_expired(clock.time)
    assert await store.touch_container("other", "cntr_1") is None


async def test_expired_container_keeps_its_row_until_it_is_old(store: ContainerStore, clock: Clock) -> None:
    await store.create_container("p", make_row(), limits=LIMITS)
    await store.create_container("q", make_row("cntr_2", idle_seconds=600), limits=LIMITS)
    await store.add_container_file("p", make_file(), limits=LIMITS)
    clock.time = START + 60
    assert await store.list_expired_containers(limit=10) == [("p", "cntr_1")]
    await store.purge_container("p", "cntr_1")
    assert await store.list_expired_containers(limit=10) == []
    assert await store.load_container_files("p", "cntr_1") == []
    assert await store.load_container("p", "cntr_1") == make_row(is_purged=True)
    assert await store.delete_purged_containers(START) == 0
    assert await store.delete_purged_containers(START + 1) == 1
    assert await store.load_container("p", "cntr_1") is None
    assert await store.load_container("q", "cntr_2") is not None


async def test_run_is_interrupted_if_its_lease_is_over_for_long(store: ContainerStore, clock: Clock) -> None:
    await store.create_container("p", make_row(), limits=LIMITS)
    assert await store.list_interrupted_runs(seconds=0, limit=10) == []
    assert await store.hold_container("p", "cntr_1", "one", lease=10)
    clock.time = START + 29
    assert await store.list_interrupted_runs(seconds=20, limit=10) == []
    clock.time = START + 30
    assert await store.list_interrupted_runs(seconds=20, limit=10) == [("p", "cntr_1")]
    assert await store.hold_container("p", "cntr_1", "two", lease=10)
    assert await store.finish_run("p", "cntr_1", "two", interpreter=None, saved=[], deleted=[])
    assert await store.list_interrupted_runs(seconds=0, limit=10) == []


async def test_interrupted_run_of_a_deleted_container_is_not_listed(store: ContainerStore, clock: Clock) -> None:
    await store.create_container("p", make_row(), limits=LIMITS)
    assert await store.hold_container("p", "cntr_1", "one", lease=10)
    clock.time = START + 90
    await store.purge_container("p", "cntr_1")
    assert await store.delete_purged_containers(START + 1) == 1
    assert await store.list_interrupted_runs(seconds=20, limit=10) == []


async def test_container_does_not_expire_while_code_runs(store: ContainerStore, clock: Clock) -> None:
    await store.create_container("p", make_row(), limits=LIMITS)
    clock.time = START + 55
    assert await store.hold_container("p", "cntr_1", "one", lease=10)
    clock.time = START + 60
    assert await store.list_expired_containers(limit=10) == []
    clock.time = START + 65
    assert await store.list_expired_containers(limit=10) == [("p", "cntr_1")]
    assert await store.hold_container("p", "cntr_1", "one", lease=10)
    assert await store.finish_run("p", "cntr_1", "one", interpreter=None, saved=[], deleted=[])
    assert await store.list_expired_containers(limit=10) == [("p", "cntr_1")]


async def test_only_live_containers_of_the_project_count(store: ContainerStore, clock: Clock) -> None:
    await store.create_container("other", make_row("cntr_0"), limits=LIMITS)
    for number in range(3):
        await store.create_container("p", make_row(f"cntr_{number}"), limits=LIMITS)
    assert await find_limit(lambda: store.create_container("p", make_row("cntr_9"), limits=LIMITS)) == "containers"
    clock.time = START + 60
    await store.create_container("p", make_row("cntr_9", last_active_at=START + 60), limits=LIMITS)


async def test_containers_are_listed_in_pages(store: ContainerStore) -> None:
    rows = [make_row(f"cntr_{number}", name=name) for number, name in enumerate(("a", "b", "a"))]
    for row in rows:
        await store.create_container("p", row, limits=LIMITS)
    listed = await store.list_containers("p", after=None, limit=2, order="asc", name=None)
    assert listed == (rows[:2], True)
    assert await store.list_containers("p", after="cntr_1", limit=2, order="asc", name=None) == (rows[2:], False)
    assert await store.list_containers("p", after="cntr_1", limit=2, order="desc", name=None) == (rows[:1], False)
    assert await store.list_containers("p", after=None, limit=2, order="desc", name="a") == ([rows[2], rows[0]], False)
    assert await store.list_containers("q", after=None, limit=2, order="asc", name=None) == ([], False)
    with pytest.raises(InvalidRequest, match="cntr_9"):
        await store.list_containers("p", after="cntr_9", limit=2, order="asc", name=None)


async def test_deleting_a_container_deletes_its_files(store: ContainerStore) -> None:
    await store.create_container("p", make_row(), limits=LIMITS)
    await store.add_container_file("p", make_file(), limits=LIMITS)
    assert await store.delete_container("other", "cntr_1") is False
    assert await store.delete_container("p", "cntr_1") is True
    assert await store.delete_container("p", "cntr_1") is False
    assert await store.sum_container_bytes("p") == 0


async def test_limits_of_files_do_not_count_the_replaced_one(store: ContainerStore) -> None:
    for number in range(3):
        await store.add_container_file("p", make_file(f"cfile_{number}", size=30), limits=LIMITS)
    assert await find_limit(lambda: store.add_container_file("p", make_file("x"), limits=LIMITS)) == "container_files"
    larger = make_file("cfile_9", path="cfile_0.txt", size=41)
    assert await find_limit(lambda: store.add_container_file("p", larger, limits=LIMITS)) == "container_bytes"
    replacement = msgspec.structs.replace(larger, bytes=40, origin="file-1")
    await store.add_container_file("p", replacement, limits=LIMITS)
    assert await store.load_container_files("p", "cntr_1") == [
        make_file("cfile_1", size=30),
        make_file("cfile_2", size=30),
        replacement,
    ]
    other = make_file("y", container_id="cntr_2", size=51)
    assert await find_limit(lambda: store.add_container_file("p", other, limits=LIMITS)) == "project_bytes"
    await store.add_container_file("q", other, limits=LIMITS)
    assert (await store.sum_container_bytes("p"), await store.sum_container_bytes("q")) == (100, 51)


async def test_files_are_updated_in_one_step(store: ContainerStore) -> None:
    for number in range(3):
        await store.add_container_file("p", make_file(f"cfile_{number}"), limits=LIMITS)
    changed, added = make_file("cfile_1", size=1000), make_file("cfile_3", source="assistant")
    await store.update_container_files("p", "cntr_1", saved=[changed, added], deleted=["cfile_0"])
    assert await store.load_container_files("p", "cntr_1") == [changed, make_file("cfile_2"), added]
    assert await store.load_container_file("p", "cntr_1", "cfile_3") == added
    assert await store.load_container_file("p", "cntr_1", "cfile_0") is None
    assert await store.load_container_file("p", "cntr_2", "cfile_3") is None
    assert await store.load_container_file("q", "cntr_1", "cfile_3") is None


async def test_files_are_listed_in_pages(store: ContainerStore) -> None:
    rows = [make_file(f"cfile_{number}") for number in range(3)]
    for row in rows:
        await store.add_container_file("p", row, limits=LIMITS)
    listed = await store.list_container_files("p", "cntr_1", after=None, limit=2, order="desc")
    assert listed == (rows[:0:-1], True)
    assert await store.list_container_files("p", "cntr_1", after="cfile_1", limit=2, order="asc") == (rows[2:], False)
    assert await store.list_container_files("q", "cntr_1", after=None, limit=2, order="asc") == ([], False)
    with pytest.raises(InvalidRequest, match="cfile_9"):
        await store.list_container_files("p", "cntr_1", after="cfile_9", limit=2, order="asc")


async def test_container_runs_code_of_one_process_at_a_time(store: ContainerStore, clock: Clock) -> None:
    await store.create_container("p", make_row(), limits=LIMITS)
    old, unchanged = make_file("cfile_1"), make_file("cfile_2")
    await store.update_container_files("p", "cntr_1", saved=[old, unchanged], deleted=[])
    assert await store.hold_container("p", "cntr_1", "one", lease=10)
    assert not await store.hold_container("p", "cntr_1", "two", lease=10)
    clock.time += 9
    assert await store.hold_container("p", "cntr_1", "one", lease=10)
    clock.time += 9
    assert not await store.hold_container("p", "cntr_1", "two", lease=10)
    clock.time += 2
    assert await store.hold_container("p", "cntr_1", "two", lease=10)
    new = make_file("cfile_3", content="abc")
    changes: Any = {"saved": [new], "deleted": ["cfile_1"]}
    assert not await store.finish_run("p", "cntr_1", "one", interpreter="first", **changes)
    assert await store.load_container_files("p", "cntr_1") == [old, unchanged]
    assert await store.finish_run("p", "cntr_1", "two", interpreter="second", **changes)
    assert await store.load_container_files("p", "cntr_1") == [unchanged, new]
    expected = make_row(interpreter="second", last_active_at=clock.time)
    assert await store.load_container("p", "cntr_1") == expected
    assert await store.hold_container("p", "cntr_1", "one", lease=10)
    assert await store.finish_run("p", "cntr_1", "one", interpreter=None, saved=[], deleted=[])
    assert await store.load_container("p", "cntr_1") == expected
    assert not await store.hold_container("q", "cntr_1", "one", lease=10)
    assert not await store.hold_container("p", "cntr_2", "one", lease=10)


def test_files_of_containers_are_beside_the_store(tmp_path: Path) -> None:
    assert locate_containers(locate_store(f"sqlite:///{tmp_path}/store.db")) == tmp_path / "store.db-containers"
    assert locate_containers(locate_store("memory:")) is None
