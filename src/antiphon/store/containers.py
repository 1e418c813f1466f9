"""The protocol of the stored containers and their files. The contents of the files are not in the store."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from antiphon.errors import AntiphonError

FileSource = Literal["user", "assistant"]


class ContainerLimitReached(AntiphonError):
    """A project has as many containers, or a container or project as many files or bytes, as are allowed.

    `limit` names it: `containers`, `container_files`, `container_bytes` or `project_bytes`.
    """

    def __init__(self, limit: str) -> None:
        super().__init__(f"The limit {limit} is reached.")
        self.limit = limit


class ContainerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A container.

    It expires `idle_seconds` after `last_active_at`. `interpreter` is the name of the interpreter that ran its last
    code, or None if none did. `is_purged`: it has expired, and its files are deleted.
    """

    id: str
    name: str
    created_at: int
    last_active_at: int
    idle_seconds: int
    memory_limit: str
    interpreter: str | None = None
    is_purged: bool = False

    def has_expired(self, now: float) -> bool:
        return self.is_purged or now >= self.last_active_at + self.idle_seconds


class ContainerFileRow(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a container. `path` is relative to its folder.

    `modified_ns` is its time on disk, 0 while it is being written. `origin` is the id of the file that it is a copy of.
    `content` is the id of its content if several machines share the store, else None: it is only on disk.
    """

    id: str
    container_id: str
    path: str
    bytes: int
    source: FileSource
    created_at: int
    modified_ns: int
    origin: str | None = None
    content: str | None = None


class ContainerLimits(NamedTuple):
    """Limits of a project, and of each of its containers."""

    containers: int
    container_files: int
    container_bytes: int
    project_bytes: int


@runtime_checkable
class ContainerStore(Protocol):
    """Containers of all projects. `is_shared`: several machines use the store, so it has the contents of files too."""

    is_shared: bool

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def create_container(self, project: str, row: ContainerRow, *, limits: ContainerLimits) -> None:
        """Save a new container. Raises ContainerLimitReached if too many of the project have not expired."""

    async def load_container(self, project: str, container_id: str) -> ContainerRow | None:
        """Return a container, or None if there is none."""

    async def touch_container(self, project: str, container_id: str) -> ContainerRow | None:
        """Set the time of the last activity to now, unless the container has expired. Return the container."""

    async def list_containers(
        self, project: str, *, after: str | None, limit: int, order: Literal["asc", "desc"], name: str | None
    ) -> tuple[list[ContainerRow], bool]:
        """Return up to `limit` containers that follow the container `after`, and True if there are more.

        Raises InvalidRequest for `after` if there is no such container.
        """

    async def delete_container(self, project: str, container_id: str) -> bool:
        """Delete a container with its file rows. Return False if there was none."""

    async def list_expired_containers(self, *, limit: int) -> list[tuple[str, str]]:
        """Return the projects and ids of expired containers of all projects whose files are not deleted.

        Containers in which a process runs code are left out.
        """

    async def list_interrupted_runs(self, *, seconds: float, limit: int) -> list[tuple[str, str]]:
        """Return the projects and ids of containers whose process ended while it ran code in them.

        Its lease ended at least `seconds` ago.
        """

    async def purge_container(self, project: str, container_id: str) -> None:
        """Delete the file rows of an expired container and mark it as purged."""

    async def delete_purged_containers(self, before: int) -> int:
        """Delete purged containers of all projects that were last active before this time. Return how many."""

    async def add_container_file(self, project: str, row: ContainerFileRow, *, limits: ContainerLimits) -> None:
        """Save a file. Raises ContainerLimitReached. A file of the same path is replaced."""

    async def update_container_files(
        self, project: str, container_id: str, *, saved: Sequence[ContainerFileRow], deleted: Sequence[str]
    ) -> None:
        """Save files without checking limits, and delete those with the given ids, in one transaction."""

    async def load_container_file(self, project: str, container_id: str, file_id: str) -> ContainerFileRow | None:
        """Return a file, or None if there is none."""

    async def list_container_files(
        self, project: str, container_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> tuple[list[ContainerFileRow], bool]:
        """Return up to `limit` files that follow the file `after`, and True if there are more.

        Raises InvalidRequest for `after` if there is no such file.
        """

    async def load_container_files(self, project: str, container_id: str) -> list[ContainerFileRow]:
        """Return all files of a container, oldest first."""

    async def sum_container_bytes(self, project: str) -> int:
        """Return the size of all files of a project's containers."""

    async def hold_container(self, project: str, container_id: str, owner: str, *, lease: float) -> bool:
        """Let a process run code in a container for `lease` seconds.

        Return False if another one does, or if there is no such container.
        """

    async def finish_run(
        self,
        project: str,
        container_id: str,
        owner: str,
        *,
        interpreter: str | None,
        saved: Sequence[ContainerFileRow],
        deleted: Sequence[str],
    ) -> bool:
        """Record the interpreter and the changed files of a run, and let others run code in the container.

        Return False, and change nothing, if the process does not hold the container any more.
        """
