"""The migrations of the stores: the files `migrations/<database>/NNN_name.sql`."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Migration(NamedTuple):
    version: int
    name: str
    script: str


def read_migrations(database: str) -> list[Migration]:
    """Return all migrations of a database (`sqlite`, `files` or `postgres`) in order."""
    folder = Path(__file__).with_name("migrations") / database
    files = sorted(folder.glob("*.sql"))
    return [Migration(int(file.name.split("_")[0]), file.name, file.read_text("utf-8")) for file in files]


def list_tables(migrations: Iterable[Migration]) -> list[str]:
    """Return the names of all tables that migrations create, also of those that a later one renames or drops."""
    scripts = "\n".join(migration.script for migration in migrations)
    return re.findall(r"^CREATE (?:VIRTUAL )?TABLE (\w+)", scripts, re.MULTILINE)
