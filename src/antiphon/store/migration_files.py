"""The migrations of the stores: the files `migrations/<database>/NNN_name.sql`."""

from importlib import resources
from typing import NamedTuple


class Migration(NamedTuple):
    version: int
    name: str
    script: str


def read_migrations(database: str) -> list[Migration]:
    """Return all migrations of a database (`sqlite` or `postgres`) in order."""
    folder = resources.files("antiphon.store") / "migrations" / database
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return [Migration(int(file.name.split("_")[0]), file.name, file.read_text("utf-8")) for file in files]
