"""One PostgreSQL database, and the connections of one process to it.

Writes are grouped on one connection (`writer.py`), reads and longer transactions use a pool (`pool.py`), and a further
connection listens for changes by other processes (`notifications.py`).

Every statement names its project. Isolation is READ COMMITTED: an operation that depends on a row locks it first.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from antiphon.bounds import remove_oldest
from antiphon.errors import ConfigError, StoreUnavailable, Unavailable
from antiphon.store.chain_cache import ChainCache
from antiphon.store.changes import OnChange
from antiphon.store.item_offsets import OffsetCache
from antiphon.store.limits import DEFAULT_LIMITS, StoreLimits
from antiphon.store.migration_files import read_migrations
from antiphon.store.operations import WriterCheck
from antiphon.store.postgres.connection import (
    OPENING_ERRORS,
    DatabaseHealth,
    PostgresConnector,
    ServerAddress,
    explain_refusal,
    make_listener,
)
from antiphon.store.postgres.migrations import explain_missing_rights, migrate
from antiphon.store.postgres.notifications import Notifications, make_channel
from antiphon.store.postgres.owner_locks import OwnerLocks
from antiphon.store.postgres.peer_link import PostgresPeerLink
from antiphon.store.postgres.pool import PostgresPool
from antiphon.store.postgres.writer import GroupedStatement, GroupWriter
from antiphon.store.write_observer import OnWrite

# Number of whole responses that are read at once.
CONCURRENT_READS = 4

# Maximum number of uncertain writes to remember.
MAX_UNCERTAIN = 10_000

CHECK = GroupedStatement("SELECT 1", is_idempotent=True)
# Writes a row, and changes nothing.
CHECK_AFTER_FAILURE = GroupedStatement(
    """
WITH written AS (
    UPDATE antiphon_schema SET name = name WHERE version = (SELECT max(version) FROM antiphon_schema) RETURNING 1
)
SELECT count(*) FROM written
""",
    is_idempotent=True,
)


class UncertainWrites:
    """Writes whose commit got no answer, by response and the number of the first event.

    The caller repeats them later, or never. So the oldest are removed when there are too many.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str, int], None] = {}

    def __contains__(self, key: tuple[str, str, int]) -> bool:
        return key in self._keys

    @contextmanager
    def track(self, project: str, response_id: str, first: int) -> Iterator[bool]:
        """Yield True if an earlier write is uncertain. Remember this one if it is."""
        key = (project, response_id, first)
        try:
            yield key in self._keys
        except StoreUnavailable:
            self._keys[key] = None
            remove_oldest(self._keys, MAX_UNCERTAIN)
            raise
        self._keys.pop(key, None)


class PostgresDatabase:
    """Base of the parts of the PostgreSQL store. `now` is the clock for expiry.

    Leases use the clock of the database, because the clocks of several machines differ. With a `now`, they use that
    one, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        now: Callable[[], float] | None = None,
        configuration_id: str | None = None,
        limits: StoreLimits = DEFAULT_LIMITS,
    ) -> None:
        self.address = ServerAddress(url)
        self._listener = make_listener(limits.listen_url)
        self._limits = limits
        self._clock = now
        self._now = now or time.time
        self.configuration_id = configuration_id or secrets.token_hex(16)
        self._on_change: OnChange | None = None
        self.on_write: OnWrite | None = None
        self._health = DatabaseHealth(self.address)
        self._reads = asyncio.Semaphore(CONCURRENT_READS)
        self._large_reads = asyncio.Lock()
        self._chain_locks = WeakValueDictionary[tuple[str, str], asyncio.Lock]()
        self._offsets = OffsetCache()
        self._chain_cache = ChainCache(max_bytes=limits.chain_cache_bytes)
        self._uncertain = UncertainWrites()
        self._parts: tuple[GroupWriter, PostgresPool, Notifications] | None = None
        self._owner_locks = OwnerLocks()
        self.peer_link: PostgresPeerLink | None = None
        self._check = WriterCheck()

    async def open(self) -> None:
        connector = PostgresConnector(self.address)
        try:
            connection = await connector.connect()
            try:
                migrations = read_migrations("postgres")
                schema = await migrate(connection, migrations, name=str(self.address))
                reason = await explain_missing_rights(connection, migrations)
                if reason is not None:
                    raise ConfigError(f"The store {self.address} cannot be opened: {reason}.")
            except BaseException:
                connection.terminate()
                raise
        except OPENING_ERRORS as error:
            raise explain_refusal(self.address, error) from None
        pool = PostgresPool(connector, self._health, size=self._limits.connections)
        pool.add(connection)
        notifications = Notifications(
            self._choose_listener(connector), pool, channel=make_channel(schema), has_own_url=self._listener is not None
        )
        self._parts = GroupWriter(connector, self._health, on_write=self.on_write), pool, notifications
        self.peer_link = PostgresPeerLink(notifications, pool)
        self.on_change = self._on_change

    @property
    def on_change(self) -> OnChange | None:
        return self._on_change

    @on_change.setter
    def on_change(self, on_change: OnChange | None) -> None:
        self._on_change = on_change
        if on_change is not None and self._parts is not None:
            self._notifications.listen(on_change)

    def _choose_listener(self, connector: PostgresConnector) -> PostgresConnector | None:
        """Return the connector for LISTEN, or None if only a pooler can be reached, which does not support it."""
        if self._listener is not None:
            return self._listener
        return None if connector.is_pooled else connector

    async def close(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            writer, pool, notifications = parts
            if self.peer_link is not None:
                await self.peer_link.close()
            await writer.close()
            await notifications.close()
            await pool.close()
        self._chain_cache.clear()

    @property
    def failure(self) -> StoreUnavailable | None:
        return self._health.failure

    @property
    def reports_changes(self) -> bool:
        return self._parts is not None and self._parts[2].is_listening

    async def check(self) -> None:
        writer, statement = self._writer, CHECK if self.failure is None else CHECK_AFTER_FAILURE
        await self._check.run(lambda: writer.submit(statement, ()), self.failure)

    async def shrink(self) -> int:
        """Do nothing: PostgreSQL's autovacuum makes the space of deleted rows usable again."""
        _ = self._writer
        return 0

    @property
    def _writer(self) -> GroupWriter:
        return self._get_parts()[0]

    @property
    def _reader(self) -> PostgresPool:
        return self._get_parts()[1]

    @property
    def _notifications(self) -> Notifications:
        return self._get_parts()[2]

    def _get_parts(self) -> tuple[GroupWriter, PostgresPool, Notifications]:
        if self._parts is None:
            raise Unavailable("The store is not open.")
        return self._parts
