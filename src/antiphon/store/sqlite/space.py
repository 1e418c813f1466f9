"""Return of unused space to the file system.

SQLite keeps the pages of deleted rows in the file and uses them again. A new database is created with incremental
vacuum: pages are moved to the front of the file and the end is cut off, in small transactions. A database of an older
version has to be rewritten once: `antiphon vacuum`.
"""

import asyncio
import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from antiphon.errors import ConfigError
from antiphon.store.sqlite.checkpoints import truncate_log
from antiphon.store.sqlite.database import Database, OutsideTransaction, connect
from antiphon.store.sqlite.leases import LiveProcesses, locate_owners

logger = logging.getLogger(__name__)

# Number of pages that one transaction moves, and the pause after it, so that other writers wait only briefly.
SLICE_PAGES = 64
PAUSE_SECONDS = 0.01
# Free pages that stay in the file for new rows: this share of the file, but at least this number.
SPARE_PART = 20
SPARE_PAGES = 128
# A database that cannot be shrunk gets a warning if it has more free space than this, and more than a quarter of it.
WARNING_BYTES = 64 * 1024 * 1024

INCREMENTAL = 2


class Space(NamedTuple):
    """The pages of a database file, and those of them that are not used."""

    page_size: int
    pages: int
    free_pages: int
    auto_vacuum: int

    @property
    def removable_pages(self) -> int:
        return max(0, self.free_pages - max(SPARE_PAGES, self.pages // SPARE_PART))


class SqliteSpace(Database):
    async def shrink(self) -> int:
        space: Space = await self._writer.submit(_read_space, ())
        if space.auto_vacuum != INCREMENTAL:
            self._warn_about_space(space)
            return 0
        removed = 0
        while slice_removed := await self._writer.submit(_remove_pages, ()):
            removed += slice_removed
            await asyncio.sleep(PAUSE_SECONDS)
        if removed:
            await self._writer.submit(OutsideTransaction(truncate_log), ())
        return removed * space.page_size

    def _warn_about_space(self, space: Space) -> None:
        free = space.free_pages * space.page_size
        if free > WARNING_BYTES and space.free_pages > space.pages // 4:
            logger.warning(
                "the store %s has %d MB of unused space. Stop the server and run `antiphon vacuum` to free it",
                self.path,
                free >> 20,
            )


def vacuum_file(path: Path) -> tuple[int, int]:
    """Rewrite a database without unused space, so that it can be shrunk from then on. Return its old and new size.

    Raises ConfigError if there is no file, if a server uses it, or if the disk has no space for two copies.
    """
    if not path.is_file():
        raise ConfigError(f"There is no store at {path}.")
    if LiveProcesses(locate_owners(path)).has_live():
        raise ConfigError(f"A server uses the store {path}. Stop it first.")
    before = path.stat().st_size
    free = shutil.disk_usage(path.parent).free
    if free < 2 * before:
        raise ConfigError(
            f"Rewriting {path} needs twice its size, {2 * before >> 20} MB, but the disk has only {free >> 20} MB free."
        )
    try:
        with closing(connect(path)) as connection:
            connection.execute("VACUUM")
            truncate_log(connection)
    except sqlite3.Error as error:
        raise ConfigError(f"The store {path} cannot be rewritten: {error}.") from error
    return before, path.stat().st_size


def _read_space(connection: sqlite3.Connection) -> Space:
    names = ("page_size", "page_count", "freelist_count", "auto_vacuum")
    return Space(*(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names))


def _remove_pages(connection: sqlite3.Connection) -> int:
    """Remove some unused pages from the file. Return how many."""
    space = _read_space(connection)
    count = min(SLICE_PAGES, space.removable_pages)
    if not count:
        return 0
    # Each row of the result removes a page.
    connection.execute(f"PRAGMA incremental_vacuum({count})").fetchall()
    return space.pages - _read_space(connection).pages
