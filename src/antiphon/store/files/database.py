"""The database of files and vector stores."""

from abc import abstractmethod

from antiphon.store.files.chunks import ChunkTable
from antiphon.store.files.files import FileTable
from antiphon.store.files.vector_stores import VectorStoreTable


class FileDatabase(FileTable, VectorStoreTable, ChunkTable):
    """All tables of files. Every row belongs to a project, except that the queue of the indexing serves all."""

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...
