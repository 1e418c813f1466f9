"""`antiphon db`: show, migrate, clean, export and import the store."""

import asyncio
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import msgspec

from antiphon.cli.run_options import LEDGER_FILE
from antiphon.cli.settings import load_settings
from antiphon.config.readers import hide_password
from antiphon.config.settings import Settings
from antiphon.errors import ConfigError
from antiphon.server.store_users import check_unused
from antiphon.store.limits import DEFAULT_LIMITS
from antiphon.store.location import is_postgres, locate_existing_store, locate_files, locate_store
from antiphon.store.transfer import TransferStore, export_lines, import_lines


def run(arguments: Namespace) -> int:
    settings = load_settings(arguments, store=arguments.store)
    if settings.store.startswith("memory:"):
        raise ConfigError("A memory store has no database: its data is lost when the server ends.")
    commands = {"status": _show_status, "migrate": _migrate, "expire": _expire, "export": _export, "import": _import}
    try:
        with _raise_for_signals():
            asyncio.run(commands[arguments.db_command](settings, arguments))
    except OSError as error:
        if error.filename is None:  # of the output, not of the file to import
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}.") from None
    return 0


@contextmanager
def _raise_for_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and SIGTERM, so that incomplete files are deleted.

    asyncio would cancel the task for SIGINT. This has no effect while it reads SQLite, or waits for a pipe.
    """
    numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


async def _show_status(settings: Settings, arguments: Namespace) -> None:
    async with _open(settings, is_import=False) as store:
        facts = await store.describe()
    if arguments.json:
        print(msgspec.json.encode({"store": hide_password(settings.store), **facts}).decode())
        return
    print(f"store   {hide_password(settings.store)}")
    print(f"schema  {facts['schema']} ({_describe_schema(facts['schema'], facts['newest'])})")
    print(f"size    {facts['bytes'] / 1e6:.1f} MB")
    for name, count in facts["rows"].items():
        print(f"{name:15} {count:>10}")


def _describe_schema(schema: int, newest: int) -> str:
    if schema > newest:
        return f"of a newer version of Antiphon, this one supports up to {newest}"
    return "current" if schema == newest else f"not migrated, {newest} is current"


async def _migrate(settings: Settings, _: Namespace) -> None:
    store = locate_store(settings.store)
    await store.open()
    await store.close()
    print(f"{hide_password(settings.store)} has the current schema.")


async def _expire(settings: Settings, _: Namespace) -> None:
    store = locate_existing_store(settings.store)
    await store.open()
    try:
        deleted = await store.expire(int(time.time()))
        freed = await store.shrink()
    finally:
        await store.close()
    files = await _expire_files(settings)
    print(f"{deleted} expired responses and conversations were deleted, and the contents of {files} files.")
    print(f"{freed / 1e6:.1f} MB were freed.")


async def _expire_files(settings: Settings) -> int:
    """Delete expired files and uploads, and the files of expired vector stores. Return the number of contents."""
    location = locate_files(settings.store, contents=settings.files.directory)
    if not location.exists():
        return 0
    database, contents = await location.open(now=None, limits=DEFAULT_LIMITS)
    try:
        unused = await database.expire_files(int(time.time()))
        await contents.delete(unused)
        await database.expire_vector_stores()
    finally:
        await database.close()
        await contents.close()
    return len(unused)


async def _export(settings: Settings, arguments: Namespace) -> None:
    path: Path | None = arguments.output
    async with _open(settings, is_import=False) as store:
        _check_exported_schema(*await store.read_schema(), shown=hide_password(settings.store))
        if path is None:
            with _discard_buffered_output():
                await _write_export(store, sys.stdout.buffer, name="standard output")
            return
        with _explain_output(str(path)):
            # It contains conversations, files and digests of keys. Only the user of the process can read it.
            file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        with file, _delete_incomplete(path):
            await _write_export(store, file, name=str(path))


@contextmanager
def _explain_output(name: str) -> Iterator[None]:
    """Raise ConfigError if an export cannot be written. An OSError would be taken for one of the store."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"The export cannot be written to {name}: {error.strerror}.") from None


@contextmanager
def _discard_buffered_output() -> Iterator[None]:
    """Replace standard output after an error: flushing its buffer would wait for a reader that has stopped reading."""
    try:
        yield
    except BaseException:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


@contextmanager
def _delete_incomplete(path: Path) -> Iterator[None]:
    """Delete a file after an error: it would stop the next attempt."""
    try:
        yield
    except BaseException:
        path.unlink()
        raise


async def _write_export(store: TransferStore, file: BinaryIO, *, name: str) -> None:
    async for line in export_lines(store):
        with _explain_output(name):
            file.write(line)
    with _explain_output(name):
        file.flush()


def _check_exported_schema(schema: int, newest: int, *, shown: str) -> None:
    if schema == newest:
        return
    advice = "Use a newer version of Antiphon" if schema > newest else "Run antiphon db migrate first"
    raise ConfigError(f"{shown} has schema version {schema}, and an export needs version {newest}. {advice}.")


async def _import(settings: Settings, arguments: Namespace) -> None:
    path: Path | None = arguments.file
    file = sys.stdin.buffer if path is None else path.open("rb")
    try:
        async with _open(settings, is_import=True) as store:
            counts = await import_lines(store, iter(file))
    finally:
        if path is not None:
            file.close()
    print(", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing", "imported.")


@asynccontextmanager
async def _open(settings: Settings, *, is_import: bool) -> AsyncIterator[TransferStore]:
    url, folder = settings.store, settings.files.directory
    if is_postgres(url):
        from antiphon.store.postgres.transfer import open_postgres

        async with open_postgres(url, is_import=is_import, folder=Path(folder) if folder else None) as transfer:
            yield transfer
    else:
        from antiphon.store.sqlite.store import SqliteStore
        from antiphon.store.sqlite.transfer import open_sqlite

        store = locate_store(url)
        assert isinstance(store, SqliteStore)
        if is_import:
            check_unused(store.path)
        with open_sqlite(store.path, ledger=settings.data_dir / LEDGER_FILE, is_import=is_import) as file:
            yield file
