"""Inspection of the store of the settings: its condition, and its API keys."""

import asyncio

from antiphon.config.settings import Settings
from antiphon.errors import AntiphonError, ConfigError
from antiphon.server.exposure import is_local_host
from antiphon.store.condition import StoreCondition
from antiphon.store.location import is_postgres, locate_store
from antiphon.store.sqlite.store import SqliteStore

_TIMEOUT_SECONDS = 5.0


async def has_stored_keys(settings: Settings) -> bool:
    """Return True if the store has API keys. It is opened only if a server cannot start without them.

    Raises ConfigError if the store cannot be opened.
    """
    if settings.api_keys or settings.stateless or is_local_host(settings.host):
        return False
    try:
        condition = await asyncio.wait_for(inspect_store(settings.store), _TIMEOUT_SECONDS)
    except TimeoutError:
        raise ConfigError(f"The store does not answer within {_TIMEOUT_SECONDS:g} seconds.") from None
    except (AntiphonError, OSError) as error:
        raise ConfigError(str(error)) from error
    return condition is not None and condition.has_keys


async def inspect_store(url: str) -> StoreCondition | None:
    """Return the condition of a store, or None if it does not exist yet or is in memory."""
    if is_postgres(url):
        from antiphon.store.postgres.inspection import inspect_database

        return await inspect_database(url)
    store = locate_store(url)
    if not isinstance(store, SqliteStore) or not store.path.exists():
        return None
    from antiphon.store.sqlite.inspection import inspect_file

    return await asyncio.to_thread(inspect_file, store.path.absolute())
