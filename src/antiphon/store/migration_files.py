"""The migrations of the stores: the files `migrations/<database>/NNN_name.sql`."""

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
