"""`antiphon keys`: create, list, revoke and rotate the API keys in the store."""

import asyncio
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from antiphon.cli.missing_store import is_missing
from antiphon.cli.settings import load_settings
from antiphon.config.settings import Settings
from antiphon.errors import ConfigError
from antiphon.store.base import Store
from antiphon.store.keys import KeyStore, StoredKey, compute_digest, generate_key, generate_secret
from antiphon.store.limits import DEFAULT_LIMITS
from antiphon.store.location import find_missing_file, locate_store
from antiphon.text_table import format_table, measure_columns, measure_table, replace_controls, shorten_text

_COLUMNS = ("ID", "PROJECT", "NAME", "SCOPES", "STATE", "CREATED", "EXPIRES", "LAST USED")
_CREATED, _STATE = _COLUMNS.index("CREATED"), _COLUMNS.index("STATE")
_LABELS = (_COLUMNS.index("NAME"), _COLUMNS.index("PROJECT"))
_DATE_LENGTH = len("2026-01-01")
# A shortened name or project is not shorter than this.
_MIN_LABEL = 6


def run(arguments: Namespace) -> int:
    settings = load_settings(arguments, store=arguments.store)
    if settings.stateless and arguments.store is None:
        raise ConfigError(
            "stateless: a stateless server has no keys in a store. Set api_keys, or name another store by --store."
        )
    if settings.store.startswith("memory:"):
        raise ConfigError("A memory store has no lasting keys: its data is lost when the server ends. Set api_keys.")
    asyncio.run(_execute(settings, arguments))
    return 0


async def _execute(settings: Settings, arguments: Namespace) -> None:
    url = settings.store
    commands = {"create": _create, "list": _list, "revoke": _revoke, "rotate": _rotate}
    if arguments.keys_command == "list" and is_missing(url):
        _print_keys([], arguments)
        return
    if arguments.keys_command in ("revoke", "rotate") and find_missing_file(url):
        raise _make_unknown_key(arguments.id)
    store = locate_store(url, limits=DEFAULT_LIMITS._replace(max_keys=settings.max_keys))
    await store.open()
    try:
        await commands[arguments.keys_command](store, arguments)
    finally:
        await store.close()


async def _create(store: Store, arguments: Namespace) -> None:
    if any(each.id == arguments.project and each.archived_at is not None for each in await store.list_projects()):
        raise ConfigError(f"The project {arguments.project!r} is archived.")
    now = int(time.time())
    expires_at = None if arguments.expires is None else now + arguments.expires
    scopes = arguments.scope or ("inference",)
    key, secret = generate_key(arguments.project, arguments.name or "", scopes, created_at=now, expires_at=expires_at)
    await store.save_key(key)
    _print_secret(key, secret, arguments)


async def _list(store: KeyStore, arguments: Namespace) -> None:
    _print_keys(await store.list_keys(), arguments)


def _print_keys(keys: Sequence[StoredKey], arguments: Namespace) -> None:
    now = time.time()
    if arguments.json:
        print(msgspec.json.encode([_describe(key, now) for key in keys]).decode())
    elif keys:
        _print_table([_COLUMNS, *(_make_row(key, now) for key in keys)])
    else:
        print("There are no keys. 'antiphon keys create --project NAME' creates one.")


async def _revoke(store: KeyStore, arguments: Namespace) -> None:
    key = await _find(store, arguments.id)
    revoked = await store.revoke_key(key.id, int(time.time()))
    print(f"{key.id} is revoked." if revoked else f"{key.id} was revoked already.")


async def _rotate(store: KeyStore, arguments: Namespace) -> None:
    key = await _find(store, arguments.id)
    now = int(time.time())
    expires_at = key.expires_at if arguments.expires is None else now + arguments.expires
    if expires_at is not None and expires_at <= now:
        raise ConfigError(f"The key {key.id} has expired. Give it a new time with --expires.")
    secret = generate_secret()
    digest = compute_digest(secret.encode())
    if not await store.rotate_key(key.id, digest, expires_at):
        raise ConfigError(f"The key {key.id} is revoked. Create a new one.")
    _print_secret(key._replace(digest=digest, expires_at=expires_at), secret, arguments)


async def _find(store: KeyStore, key_id: str) -> StoredKey:
    for key in await store.list_keys():
        if key.id == key_id:
            return key
    raise _make_unknown_key(key_id)


def _make_unknown_key(key_id: str) -> ConfigError:
    return ConfigError(f"There is no key {key_id!r}. 'antiphon keys list' shows the ids.")


def _print_secret(key: StoredKey, secret: str, arguments: Namespace) -> None:
    if arguments.json:
        fields = {
            "id": key.id,
            "key": secret,
            "project": key.project,
            "name": key.name,
            "scopes": key.scopes,
            "created_at": key.created_at,
            "expires_at": key.expires_at,
        }
        print(msgspec.json.encode(fields).decode())
        return
    print(f"id       {key.id}")
    print(f"project  {replace_controls(key.project)}")
    print(f"scopes   {', '.join(key.scopes)}")
    print(f"expires  {_format_time(key.expires_at, 'never')}")
    print(f"key      {secret}")
    print("Store the key now: it cannot be shown again.")


def _describe(key: StoredKey, now: float) -> dict[str, Any]:
    """Return a key as JSON shows it, without its digest."""
    fields = {**key._asdict(), "status": _find_status(key, now)}
    del fields["digest"]
    return fields


def _find_status(key: StoredKey, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"


def _make_row(key: StoredKey, now: float) -> tuple[str, ...]:
    return (
        key.id,
        replace_controls(key.project),
        replace_controls(key.name) or "-",
        ",".join(key.scopes),
        _find_status(key, now),
        _format_time(key.created_at, "-"),
        _format_time(key.expires_at, "never"),
        _format_time(key.last_used_at, "never"),
    )


def _print_table(rows: list[tuple[str, ...]]) -> None:
    table = [list(row) for row in rows]
    if sys.stdout.isatty():
        _fit(table, shutil.get_terminal_size().columns)
    for line in format_table(table):
        print(line)


def _fit(table: list[list[str]], columns: int) -> None:
    """Make a table narrower until it fits the terminal, if possible. Ids and scopes are never shortened.

    Times lose their hours first, then the creation and the state are left out, and at last labels are shortened.
    """
    for narrow in (_shorten_times, _remove_creation, _remove_state):
        if measure_table(table) > columns:
            narrow(table)
    for column in _LABELS:
        excess = measure_table(table) - columns
        if excess > 0:
            limit = max(_MIN_LABEL, len(_COLUMNS[column]), measure_columns(table)[column] - excess)
            for row in table:
                row[column] = shorten_text(row[column], limit)


def _shorten_times(table: list[list[str]]) -> None:
    for row in table[1:]:
        row[_CREATED:] = [text[:_DATE_LENGTH] for text in row[_CREATED:]]


def _remove_creation(table: list[list[str]]) -> None:
    for row in table:
        del row[_CREATED]


def _remove_state(table: list[list[str]]) -> None:
    """Remove the state, and show that of an expired or revoked key in place of its expiry."""
    for row in table:
        state = row.pop(_STATE)
        if state in ("expired", "revoked"):
            row[_STATE] = state


def _format_time(seconds: int | None, absent: str) -> str:
    return absent if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
