"""The operations on containers that the code interpreter needs from the engine."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from antiphon.protocol.containers import AutoContainer, ContainerFile
from antiphon.tools.hosted.code_interpreter.messages import CodeResult


class CodeRun(NamedTuple):
    """The result of code in a container.

    `has_restarted`: the variables of earlier calls were lost before this one. `files` are all files of the container
    after it.
    """

    result: CodeResult
    has_restarted: bool
    files: Sequence[ContainerFile]


class ContainerService(Protocol):
    """The containers of a server, as the code interpreter uses them."""

    def check_options(self, options: AutoContainer, *, param: str) -> None:
        """Raise InvalidRequest for options that this server does not have. `param` is the path of the container."""

    async def find_active(self, project: str, container_ids: Sequence[str], *, param: str) -> str | None:
        """Return the first of these containers that exists, or None. Raises InvalidRequest if it has expired."""

    async def require_active(self, project: str, container_id: str, *, param: str) -> None:
        """Raise NotFound or InvalidRequest unless the container exists and has not expired."""

    async def check_files(self, project: str, file_ids: Sequence[str], *, param: str) -> None:
        """Raise NotFound unless the project has all these files."""

    async def create_auto(self, project: str, container_id: str, options: AutoContainer) -> None:
        """Create a container with the given id and options, and copy its files into it."""

    async def copy_files(self, project: str, container_id: str, file_ids: Sequence[str]) -> None:
        """Copy files into a container, except those that were copied before."""

    async def run_code(self, project: str, container_id: str, code: str) -> CodeRun:
        """Run code in a container."""

    async def load_files(self, project: str, container_id: str) -> Sequence[ContainerFile]:
        """Return all files of a container, oldest first."""
