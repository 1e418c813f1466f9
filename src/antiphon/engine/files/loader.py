"""The file service of a server, loaded at its first use: most servers have no files, and its modules take time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from antiphon.config.limits import FileLimits
from antiphon.config.settings import EmbeddingSettings
from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.protocol.filters import Filter
from antiphon.store.files.location import TEMPORARY, FileLocation
from antiphon.store.limits import DEFAULT_LIMITS, StoreLimits
from antiphon.tasks import cancel_tasks
from antiphon.tools.hosted.base import FoundText

if TYPE_CHECKING:
    from antiphon.engine.files.service import FileService

# Time after which files that a dead process on another machine indexed are taken over.
LEASE_SECONDS = 15.0


class FileServiceLoader:
    """Loads the file service.

    `has_files` returns True if the database at the location has files. It is called from time to time until the service
    is loaded, because another machine may have stored files, whose indexing this one continues if that one dies.
    """

    def __init__(
        self,
        location: FileLocation = TEMPORARY,
        *,
        limits: FileLimits | None = None,
        embeddings: EmbeddingSettings | None = None,
        lease: float = LEASE_SECONDS,
        store_limits: StoreLimits = DEFAULT_LIMITS,
        has_files: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._location = location
        self.limits = limits or FileLimits()
        self._embeddings = embeddings
        self._lease = lease
        self._store_limits = store_limits
        self._has_files = has_files
        self._watcher: asyncio.Task[None] | None = None
        self._service: FileService | None = None

    @property
    def is_used(self) -> bool:
        """True if the server may have files."""
        return self._service is not None or self._location.url is not None

    def start(self) -> None:
        """Load the service if an earlier process has stored files, and continue to index them."""
        if self._has_files is not None:
            self._watcher = asyncio.create_task(self._watch(self._has_files))
        elif self._location.exists():
            self.load()

    def load(self) -> "FileService":
        """Return the service. Call this in the event loop of the server."""
        if self._service is None:
            from antiphon.engine.files.service import FileService

            self._service = FileService(
                self._location,
                limits=self.limits,
                embeddings=self._embeddings,
                lease=self._lease,
                store_limits=self._store_limits,
            )
            self._service.start()
        return self._service

    async def close(self) -> None:
        await cancel_tasks(self._watcher)
        if self._service is not None:
            await self._service.close()

    async def _watch(self, has_files: Callable[[], Awaitable[bool]]) -> None:
        while self._service is None:
            with suppress(AntiphonError):  # the store reports it
                if await has_files():
                    self.load()
            await asyncio.sleep(self._lease)


class VectorSearch:
    """The searches of hosted tools in the vector stores of a server."""

    def __init__(self, files: FileServiceLoader) -> None:
        self._files = files

    async def check_store(self, project: str, store_id: str, *, param: str) -> None:
        await self._files.load().vector_stores.check_store(project, store_id, param=param)

    async def search(
        self,
        project: str,
        store_ids: Sequence[str],
        queries: Sequence[str],
        *,
        limit: int,
        condition: Filter | None = None,
        threshold: float = 0.0,
        weights: tuple[float, float] = (0.8, 0.2),
    ) -> list[FoundText]:
        from antiphon.engine.files.search import SearchQuery
        from antiphon.retrieval.ranking import SearchWeights

        stores = self._files.load().vector_stores
        query = SearchQuery(queries, limit, condition, threshold, SearchWeights(*weights))
        found = [chunk for store_id in store_ids for chunk in await stores.find_chunks(project, store_id, query)]
        found.sort(key=lambda chunk: -chunk.score)
        return [
            FoundText(
                file_id=chunk.file_id,
                filename=chunk.filename,
                text=chunk.text,
                score=chunk.score,
                attributes=chunk.attributes,
            )
            for chunk in found[:limit]
        ]


class StoredImages:
    """The images among the files of a server, for hosted tools."""

    def __init__(self, files: FileServiceLoader) -> None:
        self._files = files

    async def check_file(self, project: str, file_id: str, *, param: str) -> None:
        await self._files.load().files.find(project, file_id, param=param)

    async def load_image(self, project: str, file_id: str, *, max_bytes: int) -> tuple[str, bytes]:
        from antiphon.engine.prepare.media import find_image_type

        row, parts = await self._files.load().files.open_for_tools(project, file_id, param="file_id")
        if row.bytes > max_bytes:
            raise InvalidRequest(f"The file '{file_id}' is too large: at most {max_bytes} bytes are allowed.")
        data = b"".join([part async for part in parts])
        kind = find_image_type(data)
        if kind is None:
            raise InvalidRequest(f"The file '{file_id}' is not an image. Supported are PNG, JPEG, GIF and WebP.")
        return kind, data
