"""`antiphon vacuum`: rewrite the store without unused space."""

from argparse import Namespace

from antiphon.cli.settings import load_settings
from antiphon.errors import ConfigError
from antiphon.store.location import locate_store
from antiphon.store.sqlite.space import vacuum_file
from antiphon.store.sqlite.store import SqliteStore


def run(arguments: Namespace) -> int:
    store = locate_store(load_settings(arguments).store)
    if not isinstance(store, SqliteStore):
        raise ConfigError("Only a SQLite store can be rewritten.")
    before, after = vacuum_file(store.path)
    print(f"{store.path} now has {after / 1e6:.1f} MB. It had {before / 1e6:.1f} MB.")
    return 0
