"""All operations on files of one server, with the parts that they share."""

import asyncio
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePath

from antiphon.config.limits import FileLimits
from antiphon.config.settings import EmbeddingSettings
from antiphon.engine.files.embedding import make_embedder
from antiphon.engine.files.files import Files
from antiphon.engine.files.indexing import Indexer
from antiphon.engine.files.loader import LEASE_SECONDS
from antiphon.engine.files.search import Searcher
from antiphon.engine.files.storage import FileStorage
from antiphon.engine.files.uploads import Uploads
from antiphon.engine.files.vector_stores import VectorStores
from antiphon.errors import InvalidRequest, StoreUnavailable
from antiphon.retrieval.extract import PARSED_SUFFIXES, Unreadable, decode_text
from antiphon.retrieval.process import FileReader
from antiphon.store.files.content import Contents
from antiphon.store.files.location import FileLocation
from antiphon.store.limits import DEFAULT_LIMITS, StoreLimits
from antiphon.tasks import cancel_tasks

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 3600.0


class FileService:
    """The files, uploads and vector stores of a server."""

    def __init__(
        self,
        location: FileLocation,
        *,
        limits: FileLimits,
        embeddings: EmbeddingSettings | None = None,
        lease: float = LEASE_SECONDS,
        store_limits: StoreLimits = DEFAULT_LIMITS,
    ) -> None:
        self._storage = FileStorage(location, limits=store_limits)
        self.now = self._storage.now
        self._embedder = make_embedder(embeddings)
        self._extractor = FileReader(limits, embed=False)
        self._indexer = Indexer(self._storage, self._embedder, limits, lease=lease)
        searcher = Searcher(self._storage, self._embedder, cache_bytes=limits.search_cache_bytes)
        self.files = Files(self._storage, limits)
        self.uploads = Uploads(self._storage, self.files, limits)
        self.vector_stores = VectorStores(self._storage, self._embedder, self._indexer, searcher)
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Delete expired files from now on. If there are files from earlier, continue to index them."""
        if self._storage.exists():
            self._indexer.wake()
        self._sweeper = asyncio.create_task(self._sweep_regularly())

    async def close(self) -> None:
        await cancel_tasks(self._sweeper)
        await self._indexer.close()
        await self._extractor.close()
        await self._embedder.close()
        await self._storage.close()

    async def open_contents(self) -> Contents:
        """Return the contents of files, for other parts of the server that store some."""
        await self._storage.open()
        return self._storage.contents

    async def load_input(
        self, project: str, file_id: str, *, param: str, check: Callable[[int, str], None]
    ) -> tuple[str, bytes] | None:
        """Return the name and the content of a file for the input of a model, or None if there is no such file.

        `check` is called with the size and the param before the file is read.
        """
        database = await self._storage.open()
        row = await database.load_file(project, file_id)
        if row is None:
            return None
        check(row.bytes, param)
        return row.filename, await self._storage.contents.read_whole(row.id)

    async def extract_text(self, data: bytes, filename: str, *, param: str) -> str:
        """Return the text of a file. Raises InvalidRequest with this param if it has none."""
        suffix = PurePath(filename).suffix.lower()
        text = None
        if suffix not in PARSED_SUFFIXES and not data.startswith(b"%PDF"):
            text = await asyncio.to_thread(decode_text, data)
        if text is not None:
            return text
        path = await asyncio.to_thread(_write_temporary, data)
        try:
            return await self._extractor.read_text(str(path), filename)
        except Unreadable as error:
            raise InvalidRequest(
                f"The model cannot read files, and the text of '{filename}' cannot be extracted: {error.message}",
                param=param,
                code="unsupported_file",
            ) from None
        finally:
            await asyncio.to_thread(path.unlink)

    async def sweep(self) -> None:
        """Delete expired files, uploads and vector stores, and contents without a row."""
        if not self._storage.is_open and not self._storage.exists():
            return
        database = await self._storage.open()
        contents = self._storage.contents
        await contents.delete(await database.expire_files(int(self._storage.now())))
        await database.expire_vector_stores()
        old = await contents.list_old()
        await contents.delete(await database.find_unknown_contents(old))

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                await self.sweep()
            except StoreUnavailable as error:
                logger.error("expired files could not be deleted: %s", error.message)
            except Exception:
                logger.exception("expired files could not be deleted")
            await asyncio.sleep(SWEEP_SECONDS)


def _write_temporary(data: bytes) -> Path:
    with tempfile.NamedTemporaryFile(prefix="antiphon-", delete=False) as file:
        file.write(data)
    return Path(file.name)
