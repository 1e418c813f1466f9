"""Containers of the code interpreter: their lifetime, their files, and the code that runs in them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.config.tools import CodeInterpreterSettings
from antiphon.engine.containers.files import (
    ContainerFiles,
    LocalContainerFiles,
    SharedContainerFiles,
    choose_path,
    make_file_id,
)
from antiphon.engine.containers.holder import ContainerHolder, container_not_found
from antiphon.engine.respond.ids import new_token
from antiphon.errors import (
    InvalidRequest,
    NotFound,
    RateLimited,
    ServerError,
    StoreUnavailable,
    UnsupportedParameter,
)
from antiphon.protocol.containers import (
    AutoContainer,
    Container,
    ContainerExpiry,
    ContainerFile,
    CreateContainer,
)
from antiphon.store.containers import (
    ContainerFileRow,
    ContainerLimitReached,
    ContainerLimits,
    ContainerRow,
    ContainerStore,
)
from antiphon.store.files.content import Contents, ContentWriter
from antiphon.tasks import cancel_tasks
from antiphon.tools.hosted.code_interpreter import sandbox
from antiphon.tools.hosted.code_interpreter.messages import DATA_PATH
from antiphon.tools.hosted.code_interpreter.service import CodeRun

if TYPE_CHECKING:
    from antiphon.engine.files.service import FileService

logger = logging.getLogger(__name__)

_GIGABYTE = 1024**3
_SWEEP_SECONDS = 30.0
_SWEEP_BATCH = 100
_DELETION_SECONDS = 3600.0
_METADATA_SECONDS = 30 * 24 * 60 * 60
_LIMIT_MESSAGES = {
    "containers": "This project has too many containers: at most {0} (setting code_interpreter.containers). "
    "Delete one, or wait until one expires.",
    "container_files": "The container has too many files: at most {0} (setting code_interpreter.container_files).",
    "container_bytes": "The files of the container are too large: at most {0} bytes together "
    "(setting code_interpreter.container_bytes).",
    "project_bytes": "The files of this project's containers are too large: at most {0} bytes together "
    "(setting code_interpreter.project_bytes).",
}


class ContainerPage(msgspec.Struct, frozen=True):
    """A page of the list of containers."""

    data: list[Container]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class ContainerFilePage(msgspec.Struct, frozen=True):
    """A page of the list of a container's files."""

    data: list[ContainerFile]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class Containers:
    """The containers of all projects. Belongs to one event loop."""

    def __init__(
        self,
        store: ContainerStore,
        settings: CodeInterpreterSettings,
        *,
        cache_dir: Path,
        root: Path | None = None,
        is_shared: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._now = now
        self._settings = settings
        self._files: ContainerFiles
        if is_shared:
            self._files = SharedContainerFiles(self._open_contents, max_files=settings.container_files)
        else:
            self._files = LocalContainerFiles(store, root, max_files=settings.container_files)
        self._holder = ContainerHolder(store, wait_seconds=settings.call_seconds)
        self._sandboxes = sandbox.Sandboxes(settings, cache_dir=cache_dir)
        self._limits = ContainerLimits(
            containers=settings.containers,
            container_files=settings.container_files,
            container_bytes=settings.container_bytes,
            project_bytes=settings.project_bytes,
        )
        self.get_file_service: Callable[[], FileService] = _refuse_files
        self._next_deletion = now() + _DELETION_SECONDS
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep_regularly())

    def start_compilation(self) -> None:
        """Compile the interpreter of the sandbox in the background, unless that has been done or is turned off."""
        if self._settings.compile_at_start:
            self._sandboxes.start_compilation()

    async def close(self) -> None:
        """End all interpreters."""
        await cancel_tasks(self._sweeper)
        await self._sandboxes.close()
        await self._files.close()

    # Containers

    async def create(self, project: str, body: CreateContainer, *, container_id: str | None = None) -> Container:
        """Create a container. Raises RateLimited if the project has too many. An error leaves no container."""
        self.check_options(body, param="")
        if body.skills:
            raise UnsupportedParameter("This server has no skills.", param="skills")
        await self.check_files(project, body.file_ids or (), param="file_ids")
        now = int(self._now())
        minutes = self._settings.idle_minutes if body.expires_after is None else body.expires_after.minutes
        row = ContainerRow(
            id=container_id or make_container_id(),
            name=body.name,
            created_at=now,
            last_active_at=now,
            idle_seconds=minutes * 60,
            memory_limit=body.memory_limit or "1g",
        )
        try:
            await self._store.create_container(project, row, limits=self._limits)
        except ContainerLimitReached as error:
            raise self._explain(error) from None
        try:
            await self._files.create(row.id)
            for index, file_id in enumerate(body.file_ids or ()):
                await self.copy_file(project, row.id, file_id, param=f"file_ids[{index}]")
        except BaseException:
            await asyncio.shield(self.delete(project, row.id))
            raise
        return _show(row, self._now())

    def check_options(self, options: CreateContainer | AutoContainer, *, param: str) -> None:
        """Raise for options that this server does not support.

        `param` is the path of the container, with a dot at its end.
        """
        memory, network = options.memory_limit, options.network_policy
        if memory is not None and parse_memory(memory) > parse_memory(self._settings.max_memory):
            raise InvalidRequest(
                f"'memory_limit': this server allows at most {self._settings.max_memory} "
                "(setting code_interpreter.max_memory).",
                param=f"{param}memory_limit",
                code="invalid_value",
            )
        if network is not None and network.type != "disabled":
            raise UnsupportedParameter(
                '\'network_policy\': the containers of this server have no network. Send {"type": "disabled"}.',
                param=f"{param}network_policy",
            )

    async def retrieve(self, project: str, container_id: str) -> Container:
        return _show(await self._touch(project, container_id), self._now())

    async def list_all(
        self, project: str, *, after: str | None, limit: int, order: Literal["asc", "desc"], name: str | None
    ) -> ContainerPage:
        rows, has_more = await self._store.list_containers(project, after=after, limit=limit, order=order, name=name)
        return ContainerPage([_show(row, self._now()) for row in rows], has_more, *_find_ends(rows))

    async def delete(self, project: str, container_id: str) -> None:
        if not await self._store.delete_container(project, container_id):
            raise container_not_found(container_id)
        await self._discard_local(container_id)

    # Files

    async def start_upload(self, project: str, container_id: str) -> ContentWriter:
        """Return a writer for the content of a new file."""
        await self.use(project, container_id)
        return await self._files.start_writing(container_id)

    async def add_file(
        self, project: str, container_id: str, filename: str, writer: ContentWriter, *, origin: str | None = None
    ) -> ContainerFile:
        """Save the written content as a new file."""
        files = await self._store.load_container_files(project, container_id)
        path = choose_path(filename, {file.path for file in files})
        row = ContainerFileRow(
            id=make_file_id(),
            container_id=container_id,
            path=path,
            bytes=writer.size,
            source="user",
            created_at=int(self._now()),
            modified_ns=0,
            origin=origin,
        )

        async def save(row: ContainerFileRow) -> None:
            try:
                await self._store.add_container_file(project, row, limits=self._limits)
            except ContainerLimitReached as error:
                raise self._explain(error) from None

        return _show_file(await self._files.add(project, row, writer, save))

    async def copy_file(
        self, project: str, container_id: str, file_id: str, *, param: str = "file_id"
    ) -> ContainerFile:
        """Copy a file of the project into a container. A file that was copied before is not copied again."""
        await self.use(project, container_id)
        known = await self._store.load_container_files(project, container_id)
        copied = next((row for row in known if row.origin == file_id), None)
        if copied is not None:
            return _show_file(copied)
        found, parts = await self.get_file_service().files.open_for_tools(project, file_id, param=param)
        if found.bytes > self._settings.container_bytes:
            raise self._explain(ContainerLimitReached("container_bytes"))
        writer = await self.start_upload(project, container_id)
        try:
            async for part in parts:
                await writer.write(part)
            return await self.add_file(project, container_id, found.filename, writer, origin=file_id)
        except BaseException:
            writer.discard()
            raise

    async def check_files(self, project: str, file_ids: Sequence[str], *, param: str) -> None:
        """Raise NotFound unless the project has all these files. `param` is the path of the list."""
        for index, file_id in enumerate(file_ids):
            await self.get_file_service().files.find(project, file_id, param=f"{param}[{index}]")

    async def retrieve_file(self, project: str, container_id: str, file_id: str) -> ContainerFile:
        await self.use(project, container_id)
        return _show_file(await self._load_file(project, container_id, file_id))

    async def list_files(
        self, project: str, container_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> ContainerFilePage:
        await self.use(project, container_id)
        rows, has_more = await self._store.list_container_files(
            project, container_id, after=after, limit=limit, order=order
        )
        return ContainerFilePage([_show_file(row) for row in rows], has_more, *_find_ends(rows))

    async def open_file(
        self, project: str, container_id: str, file_id: str
    ) -> tuple[ContainerFile, AsyncIterator[bytes]]:
        """Return a file and the parts of its content."""
        await self.use(project, container_id)
        row = await self._load_file(project, container_id, file_id)
        try:
            size, parts = await self._files.open(row)
        except OSError:
            raise _file_not_found(file_id) from None
        return msgspec.structs.replace(_show_file(row), bytes=size), parts

    async def delete_file(self, project: str, container_id: str, file_id: str) -> None:
        await self.use(project, container_id)
        row = await self._load_file(project, container_id, file_id)
        await self._store.update_container_files(project, container_id, saved=[], deleted=[file_id])
        await self._files.forget(row)

    async def load_files(self, project: str, container_id: str) -> list[ContainerFile]:
        """Return all files of a container, oldest first."""
        return [_show_file(row) for row in await self._store.load_container_files(project, container_id)]

    # Code

    async def find_active(self, project: str, container_ids: Sequence[str], *, param: str) -> str | None:
        """Return the first of these containers that exists, or None. Raises InvalidRequest if it has expired."""
        for container_id in container_ids:
            row = await self._store.load_container(project, container_id)
            if row is not None:
                await self.require_active(project, container_id, param=param)
                return container_id
        return None

    async def require_active(self, project: str, container_id: str, *, param: str) -> None:
        """Raise NotFound or InvalidRequest unless the container exists and has not expired."""
        await self.use(project, container_id, param=param)

    async def copy_files(self, project: str, container_id: str, file_ids: Sequence[str]) -> None:
        """Copy files into a container, except those that were copied before."""
        for file_id in file_ids:
            await self.copy_file(project, container_id, file_id)

    async def create_auto(self, project: str, container_id: str, options: AutoContainer) -> None:
        """Create the container of a tool entry, and copy its files into it."""
        body = CreateContainer(name="auto", memory_limit=options.memory_limit, file_ids=options.file_ids)
        await self.create(project, body, container_id=container_id)

    async def use(self, project: str, container_id: str, *, param: str = "container_id") -> ContainerRow:
        """Return a container that has not expired, and count this as activity. `param` is named in errors."""
        row = await self._touch(project, container_id, param=param)
        if row.has_expired(self._now()):
            raise InvalidRequest("Container is expired.", param=param, code="container_expired")
        return row

    async def run_code(self, project: str, container_id: str, code: str) -> CodeRun:
        """Run code in a container and record the files that it creates, changes or deletes.

        The interpreter is on one machine. If the last code ran on another one, a new interpreter starts here: it has
        the files of the container, but not its variables.
        """
        await self.use(project, container_id)
        async with self._holder.use(project, container_id):  # a compilation takes longer than some containers live
            await self._sandboxes.wait_until_compiled()
        async with self._holder.hold(project, container_id) as owner:
            row = await self.use(project, container_id)
            if self._sandboxes.find_interpreter(container_id) not in (None, row.interpreter):
                await self._sandboxes.end(container_id)  # other code has run since, on another machine
            known = await self._store.load_container_files(project, container_id)
            await self._files.prepare(project, container_id, known)
            interpreter: str | None = None
            try:
                execution = await self._sandboxes.run(await self._make_target(project, row, known), code)
                interpreter = execution.interpreter
            finally:
                # Cancelled code may have changed files, too.
                await asyncio.shield(self._finish_run(project, container_id, owner, interpreter))
        has_restarted = row.interpreter is not None and row.interpreter != execution.interpreter
        return CodeRun(execution.result, has_restarted, await self.load_files(project, container_id))

    async def _make_target(
        self, project: str, row: ContainerRow, files: Sequence[ContainerFileRow]
    ) -> sandbox.SandboxTarget:
        used_by_others = await self._store.sum_container_bytes(project) - sum(file.bytes for file in files)
        return sandbox.SandboxTarget(
            id=row.id,
            project=project,
            folder=self._files.folders.locate(row.id),
            memory_bytes=parse_memory(row.memory_limit),
            folder_bytes=max(0, min(self._settings.container_bytes, self._settings.project_bytes - used_by_others)),
        )

    async def _finish_run(self, project: str, container_id: str, owner: str, interpreter: str | None) -> None:
        """Save the rows of the files on disk. Raises ServerError if another process has used the container."""
        rows = await self._store.load_container_files(project, container_id)
        changes = await self._files.collect(container_id, rows)
        is_saved = await self._store.finish_run(
            project, container_id, owner, interpreter=interpreter, saved=changes.saved, deleted=changes.deleted
        )
        if not is_saved:
            await self._discard_local(container_id)
            if await self._store.load_container(project, container_id) is not None:
                raise ServerError("The files of the container were not saved: another server has taken it over.")

    async def _discard_local(self, container_id: str) -> None:
        """End the interpreter of a container and delete its folder."""
        await self._sandboxes.end(container_id)
        await self._files.delete(container_id)

    async def _open_contents(self) -> Contents:
        return await self.get_file_service().open_contents()

    async def _touch(self, project: str, container_id: str, *, param: str = "container_id") -> ContainerRow:
        row = await self._store.touch_container(project, container_id)
        if row is None:
            raise container_not_found(container_id, param=param)
        return row

    async def _load_file(self, project: str, container_id: str, file_id: str) -> ContainerFileRow:
        row = await self._store.load_container_file(project, container_id, file_id)
        if row is None:
            raise _file_not_found(file_id)
        return row

    def _explain(self, error: ContainerLimitReached) -> RateLimited | InvalidRequest:
        message = _LIMIT_MESSAGES[error.limit].format(getattr(self._limits, error.limit))
        if error.limit == "containers":
            return RateLimited(message, code="container_limit_reached")
        return InvalidRequest(message, param="file", code="container_limit_reached")

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                await self.sweep()
            except StoreUnavailable as error:
                logger.error("expired containers could not be deleted: %s", error.message)
            except Exception:
                logger.exception("expired containers could not be deleted")
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Delete the files of expired containers, and later the containers themselves.

        Add the files that code had written when its process was killed.
        """
        for project, container_id in await self._store.list_expired_containers(limit=_SWEEP_BATCH):
            if self._sandboxes.is_busy(container_id):
                continue
            await self._discard_local(container_id)
            await self._store.purge_container(project, container_id)
        await self._delete_copies()
        if isinstance(self._files, LocalContainerFiles):
            async for project, container_id, owner in self._holder.take_over(limit=_SWEEP_BATCH):
                with suppress(OSError):  # its folder is missing
                    await self._finish_run(project, container_id, owner, None)
        if self._now() >= self._next_deletion:  # a write, so not at every sweep
            self._next_deletion = self._now() + _DELETION_SECONDS
            await self._store.delete_purged_containers(int(self._now()) - _METADATA_SECONDS)

    async def _delete_copies(self) -> None:
        """Delete the copies of files whose containers another machine has deleted."""
        for project, container_id in self._files.list_copies():
            row = await self._store.load_container(project, container_id)
            if (row is None or row.is_purged) and not self._sandboxes.is_busy(container_id):
                await self._discard_local(container_id)


def _refuse_files() -> "FileService":
    raise ServerError("This engine has no files.")


def make_container_id() -> str:
    return f"cntr_{new_token()}"


def parse_memory(limit: str) -> int:
    """Return a memory limit such as `4g` in bytes."""
    return int(limit.removesuffix("g")) * _GIGABYTE


def _show(row: ContainerRow, now: float) -> Container:
    return Container(
        id=row.id,
        created_at=row.created_at,
        name=row.name,
        status="expired" if row.has_expired(now) else "running",
        last_active_at=row.last_active_at,
        expires_after=ContainerExpiry(row.idle_seconds // 60),
        memory_limit=row.memory_limit,
    )


def _show_file(row: ContainerFileRow) -> ContainerFile:
    return ContainerFile(
        id=row.id,
        bytes=row.bytes,
        container_id=row.container_id,
        created_at=row.created_at,
        path=f"{DATA_PATH}/{row.path}",
        source=row.source,
    )


def _find_ends(rows: Sequence[ContainerRow | ContainerFileRow]) -> tuple[str | None, str | None]:
    """Return the ids of the first and the last row of a page."""
    return (rows[0].id, rows[-1].id) if rows else (None, None)


def _file_not_found(file_id: str) -> NotFound:
    return NotFound(f"File with id '{file_id}' not found in this container.", param="file_id")
