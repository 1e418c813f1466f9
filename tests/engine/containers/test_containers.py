"""The life of containers: expiry, and the deletion of their files. No code is run here."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.engine.containers.containers import Containers
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol.containers import AutoContainer, ContainerExpiry, CreateContainer
from antiphon.store.memory.store import MemoryStore
from antiphon.tool_settings import CodeInterpreterSettings

MINUTE = 60
DAY = 24 * 60 * 60


class Clock:
    time = 1_700_000_000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def containers(tmp_path: Path, clock: Clock) -> AsyncIterator[Containers]:
    """Containers without the task that deletes expired ones: tests call `sweep` themselves."""
    store = MemoryStore(now=clock)
    await store.open()
    opened = Containers(store, CodeInterpreterSettings(), cache_dir=tmp_path / "cache", root=tmp_path, now=clock)
    yield opened
    await opened.close()
    await store.close()


async def add_file(containers: Containers, container_id: str, name: str = "a.txt", data: bytes = b"text") -> str:
    writer = await containers.start_upload("p", container_id)
    await writer.write(data)
    return (await containers.add_file("p", container_id, name, writer)).id


async def test_every_use_delays_the_expiry(containers: Containers, clock: Clock) -> None:
    container = await containers.create("p", CreateContainer(name="work"))
    file_id = await add_file(containers, container.id)
    for _ in range(3):
        clock.time += 19 * MINUTE
        assert (await containers.retrieve("p", container.id)).status == "running"
        clock.time += 19 * MINUTE
        await containers.retrieve_file("p", container.id, file_id)


async def test_expired_container_loses_its_files_and_then_its_row(
    containers: Containers, clock: Clock, tmp_path: Path
) -> None:
    container = await containers.create("p", CreateContainer(name="work", expires_after=ContainerExpiry(5)))
    file_id = await add_file(containers, container.id)
    content = tmp_path / container.id / "data" / "a.txt"
    clock.time += 5 * MINUTE
    assert (await containers.retrieve("p", container.id)).status == "expired"
    assert content.read_bytes() == b"text"
    with pytest.raises(InvalidRequest, match=r"^Container is expired\.$") as refused:
        await containers.retrieve_file("p", container.id, file_id)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "container_id", "container_expired")
    with pytest.raises(InvalidRequest, match="expired"):
        await containers.run_code("p", container.id, "1")

    await containers.sweep()
    assert not content.parent.parent.exists()
    clock.time += 29 * DAY
    await containers.sweep()
    assert (await containers.retrieve("p", container.id)).status == "expired"
    clock.time += 2 * DAY
    await containers.sweep()
    with pytest.raises(NotFound):
        await containers.retrieve("p", container.id)


async def test_deleted_container_leaves_no_files(containers: Containers, tmp_path: Path) -> None:
    container = await containers.create("p", CreateContainer(name="work"))
    await add_file(containers, container.id)
    await containers.delete("p", container.id)
    assert not (tmp_path / container.id).exists()


async def test_files_and_folders_are_private_to_the_user(containers: Containers, tmp_path: Path) -> None:
    container = await containers.create("p", CreateContainer(name="work"))
    folder = tmp_path / container.id
    assert [path.stat().st_mode & 0o077 for path in (folder, folder / "data")] == [0, 0]


async def test_link_in_a_container_is_not_followed(containers: Containers, tmp_path: Path) -> None:
    container = await containers.create("p", CreateContainer(name="work"))
    file_id = await add_file(containers, container.id)
    (tmp_path / "secret").write_text("secret")
    path = tmp_path / container.id / "data" / "a.txt"
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(NotFound):
        await containers.open_file("p", container.id, file_id)


async def test_auto_takes_the_newest_known_container(containers: Containers, clock: Clock) -> None:
    old = await containers.create("p", CreateContainer(name="old"))
    clock.time += 15 * MINUTE
    new_id = "cntr_new"
    await containers.create_auto("p", new_id, AutoContainer(type="auto", memory_limit="4g"))
    assert (await containers.retrieve("p", new_id)).memory_limit == "4g"
    find = containers.find_active
    assert await find("p", ["cntr_unknown", new_id, old.id], param="input") == new_id
    assert await find("p", ["cntr_unknown"], param="input") is None
    assert await find("other", [new_id], param="input") is None
    clock.time += 10 * MINUTE
    with pytest.raises(InvalidRequest, match="expired") as refused:
        await find("p", [old.id, new_id], param="input")
    assert refused.value.param == "input"
