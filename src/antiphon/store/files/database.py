"""The database of files and vector stores: a SQLite file of its own, beside the contents of the files.

It is apart from the store of responses, because indexing writes much, and a response must not wait for it.
"""

from pathlib import Path

from antiphon.store.files.chunks import ChunkTable
from antiphon.store.files.files import FileTable
from antiphon.store.files.vector_stores import VectorStoreTable

DATABASE_NAME = "files.db"


class FileDatabase(FileTable, VectorStoreTable, ChunkTable):
    """All tables of files. Every row belongs to a project, except that the queue of the indexing serves all."""

    schema = "files"


def locate_database(folder: Path) -> Path:
    return folder / DATABASE_NAME
