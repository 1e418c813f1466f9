"""Containers on PostgreSQL: two servers run code with the same files."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.config.limits import FileLimits
from antiphon.config.tools import CodeInterpreterSettings
from antiphon.engine.containers.containers import Containers
from antiphon.engine.files.service import FileService
from antiphon.errors import NotFound
from antiphon.protocol.containers import CreateContainer
from antiphon.store.containers import ContainerStore
from antiphon.store.files.location import FileLocation
from antiphon.store.location import locate_store
from support.code_sandbox import HAS_BUBBLEWRAP
from support.postgres_server import EmptySchema

pytestmark = pytest.mark.skipif(not HAS_BUBBLEWRAP, reason="bubblewrap cannot be run here")

SETTINGS = CodeInterpreterSettings(sandbox="bubblewrap")
BIG = 700_000


class Server:
    """The containers and files of a server, with a store of its own on the shared database."""

    def __init__(self, url: str, folder: Path) -> None:
        self.store = locate_store(url)
        assert isinstance(self.store, ContainerStore)
        self.files = FileService(FileLocation(url=url), limits=FileLimits())
        self.containers = Containers(self.store, SETTINGS, cache_dir=folder, is_shared=True)
        self.containers.get_file_service = lambda: self.files

    async def run(self, container_id: str, code: str) -> tuple[str, bool]:
        """Run code. Return its output, and True if the variables of earlier code were lost."""
        done = await self.containers.run_code("p", container_id, code)
        return done.result.logs, done.has_restarted

    async def read_files(self, container_id: str) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        for file in await self.containers.load_files("p", container_id):
            shown, parts = await self.containers.open_file("p", container_id, file.id)
            contents[shown.path] = b"".join([part async for part in parts])
            assert shown.bytes == len(contents[shown.path])
        return contents


@pytest.fixture
async def servers(postgres_url: str, tmp_path: Path) -> AsyncIterator[list[Server]]:
    started = [Server(postgres_url, tmp_path) for _ in range(2)]
    for server in started:
        await server.store.open()
    yield started
    for server in started:
        await server.containers.close()
        await server.files.close()
        await server.store.close()


async def add_file(server: Server, container_id: str, name: str, data: bytes) -> str:
    writer = await server.containers.start_upload("p", container_id)
    await writer.write(data)
    return (await server.containers.add_file("p", container_id, name, writer)).id


async def test_code_continues_on_another_server_with_the_files_but_without_variables(
    servers: list[Server], postgres_schema: EmptySchema
) -> None:
    one, two = servers
    container_id = (await one.containers.create("p", CreateContainer(name="work"))).id
    sent = await add_file(two, container_id, "sent.txt", b"x" * BIG)
    assert await one.run(container_id, "value = len(open('sent.txt').read())\nopen('a.txt', 'w').write('one')") == (
        "3\n",
        False,
    )
    assert await one.run(container_id, "print(value)") == (f"{BIG}\n", False)
    assert await two.read_files(container_id) == {"/mnt/data/sent.txt": b"x" * BIG, "/mnt/data/a.txt": b"one"}

    code = "import os\nprint('value' in globals(), open('a.txt').read())\nopen('a.txt', 'a').write(' two')"
    logs, has_restarted = await two.run(container_id, f"{code}\nos.makedirs('sub')\nopen('sub/b.txt', 'w').close()")
    assert (logs, has_restarted) == ("False one\n", True)
    assert (await one.read_files(container_id))["/mnt/data/a.txt"] == b"one two"

    # The first server has an interpreter with old variables. It must not be used again.
    await two.containers.delete_file("p", container_id, sent)
    code = "print('value' in globals(), open('a.txt').read(), sorted(os.listdir('.')))"
    assert await one.run(container_id, f"import os\n{code}\nos.remove('sub/b.txt')") == (
        "False one two ['a.txt', 'sub']\n",
        True,
    )
    assert await two.read_files(container_id) == {"/mnt/data/a.txt": b"one two"}
    assert postgres_schema.fetch("SELECT count(*) FROM contents") == [(1,)]

    await two.containers.delete("p", container_id)
    with pytest.raises(NotFound):
        await one.run(container_id, "1")
    assert postgres_schema.fetch("SELECT count(*) FROM contents") == [(0,)]
    await one.containers.sweep()
    folder = one.containers._files.folders.locate(container_id)
    assert not folder.exists()


async def test_code_of_two_servers_runs_one_after_the_other(servers: list[Server]) -> None:
    one, two = servers
    container_id = (await one.containers.create("p", CreateContainer(name="work"))).id
    code = "number = int(open('n').read())\nopen('n', 'w').write(str(number + 1))"
    await one.run(container_id, "open('n', 'w').write('0')")
    await asyncio.gather(*(server.run(container_id, code) for server in (one, two, one)))
    assert await two.read_files(container_id) == {"/mnt/data/n": b"3"}
