"""The file service of a server, loaded at its first use: most servers have no files, and its modules take time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.config import EmbeddingSettings, FileLimits
from antiphon.protocol.filters import Filter
from antiphon.store.limits import DEFAULT_LIMITS, StoreLimits
from antiphon.tools.hosted.base import FoundText

if TYPE_CHECKING:
    from antiphon.engine.files.service import FileService


class FileServiceLoader:
    """Loads the file service. Without a folder, files are in a temporary one."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        limits: FileLimits | None = None,
        embeddings: EmbeddingSettings | None = None,
        store_limits: StoreLimits = DEFAULT_LIMITS,
    ) -> None:
        self._folder = folder
        self.limits = limits or FileLimits()
        self._embeddings = embeddings
        self._store_limits = store_limits
        self._service: FileService | None = None

    @property
    def is_used(self) -> bool:
        """True if the server may have files."""
        return self._service is not None

    def start(self) -> None:
        """Load the service if an earlier process has stored files, and continue to index them."""
        if self._folder is not None and self._folder.exists():
            self.load()

    def load(self) -> "FileService":
        """Return the service. Call this in the event loop of the server."""
        if self._service is None:
            from antiphon.engine.files.service import FileService

            self._service = FileService(
                self._folder, limits=self.limits, embeddings=self._embeddings, store_limits=self._store_limits
            )
            self._service.start()
        return self._service

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()


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
