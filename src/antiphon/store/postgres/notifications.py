"""Notifications between the processes that share a database, with LISTEN and NOTIFY.

They are hints. A change is announced after its commit, in a transaction of its own: PostgreSQL lets only one
transaction with a notification commit at a time. If a notification is lost, its receiver finds the change at its next
poll. Announcements that wait are sent together.

A notification is an announcement, or the word `message` and a text (`peer_link.py`). Events themselves are never part
of a notification: every role that can connect to the database can listen.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from antiphon.errors import AntiphonError, ConfigError
from antiphon.store.changes import (
    Announcement,
    Change,
    EventsAppended,
    OnChange,
    ReportsLost,
    decode_announcement,
    encode_announcement,
)
from antiphon.store.postgres.connection import (
    OPENING_ERRORS,
    PostgresConnector,
    ServerAddress,
    close,
    explain_refusal,
)
from antiphon.store.postgres.pool import PostgresPool

if TYPE_CHECKING:
    from asyncpg import Connection

logger = logging.getLogger(__name__)

# Seconds between attempts to connect, and between checks that the connection still works.
RECONNECT_SECONDS = 1.0
CHECK_SECONDS = 30.0
# Time after which a notification through a pooler does not arrive any more.
POOLER_SECONDS = 10.0

SEND = "SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload"

# A listener holds a shared lock as long as its connection lives.
_LOCK_KEY = "hashtextextended('antiphon listeners ' || $1, 0)"
HOLD_LOCK = f"SELECT pg_advisory_lock_shared({_LOCK_KEY})"
# The keys of all advisory locks in the database that are held, and the process numbers of their connections.
HELD_LOCKS = """
SELECT (classid::bigint << 32) | objid::bigint AS key, pid FROM pg_locks
WHERE locktype = 'advisory' AND granted AND objsubid = 1
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
# The process numbers of the connections that listen.
LISTENERS = f"SELECT pid FROM ({HELD_LOCKS}) AS held WHERE key = {_LOCK_KEY}"

# An owner of runs holds a shared lock on the same connection (`owner_locks.py`).
OWNER_LOCK_KEY = "hashtextextended('antiphon owner ' || $1::text || ' ' || owner, 0)"
HOLD_OWNER_LOCK = f"SELECT pg_advisory_lock_shared({OWNER_LOCK_KEY}) FROM (SELECT $2::text AS owner) AS held"

_MESSAGE = "message"


def make_channel(schema: str) -> str:
    """Return the channel of the processes whose tables are in this schema."""
    return f"antiphon_{schema}"


async def check_database(
    connection: "Connection[Any]", process: int, address: ServerAddress, pool: PostgresPool, *, channel: str
) -> None:
    """Raise ConfigError unless a connection for `store_listen_url` leads to the database of the pool.

    The connection holds the lock of listeners. The pool finds its process number, which needs no further rights.
    """
    listeners = {row[0] for row in await pool.submit(LISTENERS, (channel,))}
    if process not in listeners:
        await connection.execute("SELECT 1")  # fails if the lock is not held because the connection is lost
        raise ConfigError(
            f"store_listen_url: {address} is another database than that of the store. Set it to the URL of the same "
            "database."
        )


class Notifications:
    """Sends and receives notifications on one channel. `on_change` is called for those of changes.

    Notifications are received from `listen` on. `listener` is the process number of the connection that receives them
    now, or None, and `listening` is set while there is one. `listening_since` is the time at which it was opened.
    `reconnected_at` is the time at which a lost connection was replaced, and `lost_at` the time at which the last one
    was lost. `locked_owners` are the owners whose lock it holds. `on_message` is called with each text of
    `send_message`, including those of this process. `has_own_url`: the connector has another URL than the pool.
    """

    def __init__(
        self,
        connector: PostgresConnector | None,
        pool: PostgresPool,
        *,
        channel: str,
        has_own_url: bool = False,
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._has_own_url = has_own_url
        self.channel = channel
        self._on_change: OnChange = _ignore_change
        self._waiting: dict[object, str] = {}
        self._sending: asyncio.Task[None] | None = None
        self._closing = False
        self.listener: int | None = None
        self.listening = asyncio.Event()
        self.listening_since = self.reconnected_at = -math.inf
        self.lost_at = time.monotonic()
        self._has_listened = self._has_failed = False
        self.on_message: Callable[[str], None] = _ignore_message
        self._listening: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._owners: set[str] = set()
        self.locked_owners: set[str] = set()

    def listen(self, on_change: OnChange) -> None:
        """Begin to receive notifications, if there is a server to connect to."""
        self._on_change = on_change
        if self._connector is None:
            logger.warning(
                "changes by other processes are noticed with a delay: the store's URL leads to a connection pooler, "
                "which does not support LISTEN. Set store_listen_url to the URL of the PostgreSQL server"
            )
        elif self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._listen(self._connector))

    def announce(self, announcement: Announcement) -> None:
        """Report a committed change to all processes. Of several numbers, the newest is sent."""
        key: object = announcement
        if isinstance(announcement, EventsAppended):
            key = EventsAppended, announcement.response_id
        self._queue(key, encode_announcement(announcement))

    def send_message(self, text: str) -> None:
        """Send a text to all processes that listen."""
        self._queue(text, f"{_MESSAGE} {text}")

    def hold_lock(self, owner: str) -> None:
        """Hold the lock of an owner on the connection that listens, and on those that replace it."""
        if owner not in self._owners:
            self._owners.add(owner)
            self._wake.set()

    def release_lock(self, owner: str) -> None:
        """Do not hold the lock of an owner on later connections."""
        self._owners.discard(owner)

    @property
    def can_listen(self) -> bool:
        """True if notifications are received, or will be when the connection is replaced."""
        return self._listening is not None

    @property
    def is_listening(self) -> bool:
        """True if notifications are received now."""
        return self.listener is not None

    def _queue(self, key: object, payload: str) -> None:
        self._waiting[key] = payload
        if self._sending is None and not self._closing:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def close(self) -> None:
        """Send the waiting announcements, and stop."""
        self._closing = True
        if self._sending is not None:
            await asyncio.wait([self._sending])
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])

    async def _send(self) -> None:
        try:
            while self._waiting:
                payloads, self._waiting = list(self._waiting.values()), {}
                with suppress(AntiphonError):  # receivers then find the change at their next poll
                    await self._pool.submit(SEND, (self.channel, payloads))
        finally:
            self._sending = None

    async def _listen(self, connector: PostgresConnector) -> None:
        while True:
            began_at = time.monotonic()
            try:
                await self._listen_until_lost(connector)
            except ConfigError as error:
                self._report_failure(error)
                if not self._has_listened:  # else the servers may have changed their roles a moment ago
                    self._listening = None
                    return
            except AntiphonError as error:
                self._report_failure(error)
            except OPENING_ERRORS as error:  # also those of a wrong URL: `store_listen_url` is first used here
                self._report_failure(explain_refusal(connector.address, error))
            # A connection that worked is replaced at once: without it, other processes may take over the runs.
            await asyncio.sleep(max(0.0, began_at + RECONNECT_SECONDS - time.monotonic()))

    def _report_failure(self, error: AntiphonError) -> None:
        if not self._has_failed:
            logger.warning("notifications are not received: %s", error.message)
        self._has_failed = True

    async def _listen_until_lost(self, connector: PostgresConnector) -> None:
        connection = await connector.connect()
        connection.add_termination_listener(lambda _: self._wake.set())
        try:
            process = connection.get_server_pid()
            if connector.is_pooled:
                await self._check_pooler(connection, connector.address)
                process = await connection.fetchval("SELECT pg_backend_pid()")
            await connection.add_listener(self.channel, self._receive)
            await connection.execute(HOLD_LOCK, self.channel)
            if self._has_own_url:
                await check_database(connection, process, connector.address, self._pool, channel=self.channel)
            await self._lock_owners(connection)
            self.listening_since = time.monotonic()
            self.listener = process
            self.listening.set()
            if self._has_listened:
                self.reconnected_at = self.listening_since
            self._has_listened = True
            if self._has_failed:
                logger.warning("notifications are received again")
            self._has_failed = False
            # Notifications that were sent before are lost. Let all readers check once.
            self._on_change(ReportsLost())
            while not connection.is_closed():
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._wake.wait()
                self._wake.clear()
                if not connection.is_closed():
                    await self._lock_owners(connection)
                    await connection.execute("SELECT 1")
        finally:
            if self.listener is not None:
                self.lost_at = time.monotonic()
            self.listener = None
            self.listening.clear()
            self.locked_owners.clear()
            await close(connection)

    async def _check_pooler(self, connection: "Connection[Any]", address: ServerAddress) -> None:
        """Raise ConfigError unless the pooler is in session mode: only then do notifications arrive."""
        channel, received = f"{self.channel}_{secrets.token_hex(8)}", asyncio.Event()

        def receive(*_: object) -> None:
            received.set()

        await connection.add_listener(channel, receive)
        await self._pool.submit("SELECT pg_notify($1, '')", (channel,))
        try:
            async with asyncio.timeout(POOLER_SECONDS):
                await received.wait()
        except TimeoutError:
            raise ConfigError(
                f"store_listen_url: {address} is a connection pooler that does not support LISTEN. Set it to the URL "
                "of the PostgreSQL server, or of a pooler in session mode."
            ) from None
        await connection.remove_listener(channel, receive)

    async def _lock_owners(self, connection: "Connection[Any]") -> None:
        for owner in self._owners - self.locked_owners:
            await connection.execute(HOLD_OWNER_LOCK, self.channel, owner)
            self.locked_owners.add(owner)

    def _receive(self, connection: "Connection[Any]", process: int, channel: str, payload: object) -> None:
        kind, _, text = str(payload).partition(" ")
        if kind == _MESSAGE:
            self.on_message(text)
            return
        change = decode_announcement(str(payload))
        if change is not None:
            self._on_change(change)


def _ignore_change(change: Change) -> None:
    pass


def _ignore_message(text: str) -> None:
    pass
