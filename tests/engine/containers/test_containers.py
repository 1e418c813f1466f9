"""The life of containers: expiry, and the deletion of their files. No code is run here."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.tools import CodeInterpreterSettings
from antiphon.engine.containers import holder
from antiphon.engine.containers.containers import Containers
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol.containers import AutoContainer, ContainerExpiry, CreateContainer
from antiphon.store.memory.store import MemoryStore
from antiphon.tools.hosted.code_interpreter.messages import CodeResult
from antiphon.tools.hosted.code_interpreter.sandbox import SandboxRun, SandboxTarget

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


@pytest.mark.parametrize("step", ["compilation", "code"])
async def test_container_does_not_expire_during_a_call(
    containers: Containers, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(holder, "_RENEWAL_SECONDS", 0.001)
    container = await containers.create("p", CreateContainer(name="work", expires_after=ContainerExpiry(1)))

    touched = asyncio.Event()
    touch = containers._store.touch_container

    async def watch_touch(project: str, container_id: str) -> Any:
        row = await touch(project, container_id)
        touched.set()
        return row

    monkeypatch.setattr(containers._store, "touch_container", watch_touch)

    async def take_minutes() -> None:
        for _ in range(5):
            clock.time += 50
            touched.clear()
            await touched.wait()

    class SlowSandboxes:
        async def wait_until_compiled(self) -> None:
            if step == "compilation":
                await take_minutes()

        async def run(self, target: SandboxTarget, code: str) -> SandboxRun:
            if step == "code":
                await take_minutes()
            (target.folder / "data" / "made.txt").write_text(code)
            return SandboxRun(CodeResult(ending="returned"), "one")

        def find_interpreter(self, _: str) -> None:
            return None

    with monkeypatch.context() as patched:
        patched.setattr(containers, "_sandboxes", SlowSandboxes())
        async with asyncio.timeout(30):
            run = await containers.run_code("p", container.id, "1")
    assert [file.path for file in run.files] == ["/mnt/data/made.txt"]
    assert (await containers.retrieve("p", container.id)).status == "running"


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


async def test_files_of_a_killed_process_are_listed(containers: Containers, clock: Clock, tmp_path: Path) -> None:
    """Another process has run code in the container and was killed: its files are on disk, but have no rows."""
    container = await containers.create("p", CreateContainer(name="work"))
    await add_file(containers, container.id)
    assert await containers._store.hold_container("p", container.id, "killed", lease=15)
    (tmp_path / container.id / "data" / "new.txt").write_text("written")
    clock.time += MINUTE
    await containers.sweep()
    assert [file.path for file in await containers.load_files("p", container.id)] == ["/mnt/data/a.txt"]
    clock.time += 15
    await containers.sweep()
    files = await containers.load_files("p", container.id)
    assert [(file.path, file.bytes, file.source) for file in files] == [
        ("/mnt/data/a.txt", 4, "user"),
        ("/mnt/data/new.txt", 7, "assistant"),
    ]
