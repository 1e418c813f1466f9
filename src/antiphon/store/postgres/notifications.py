"""Notifications between the processes that share a database, with LISTEN and NOTIFY.

They are hints. A change is announced after its commit, in a transaction of its own: PostgreSQL lets only one
transaction with a notification commit at a time. If a notification is lost, its receiver finds the change at its next
poll. Announcements that wait are sent together.

A notification has a kind and the id of a response, separated by a space.
"""

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncpg

from antiphon.errors import AntiphonError
from antiphon.store.base import OnChange
from antiphon.store.postgres.connection import CONNECTION_ERRORS, PostgresConnector, close
from antiphon.store.postgres.pool import PostgresPool

if TYPE_CHECKING:
    from asyncpg import Connection

logger = logging.getLogger(__name__)

# Seconds between attempts to connect, and between checks that the connection still works.
RECONNECT_SECONDS = 1.0
CHECK_SECONDS = 30.0

SEND = "SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload"


class Notifications:
    """Sends and receives notifications on one channel. `on_change` is called with the kind and the response id.

    Notifications are received from `listen` on. `is_listening`: they are received now.
    """

    def __init__(
        self,
        connector: PostgresConnector | None,
        pool: PostgresPool,
        *,
        channel: str,
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._channel = channel
        self._on_change: OnChange = _ignore_change
        self._waiting: dict[str, None] = {}
        self._sending: asyncio.Task[None] | None = None
        self._closing = False
        self.is_listening = False
        self._listening: asyncio.Task[None] | None = None

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

    def announce(self, kind: str, response_id: str = "") -> None:
        """Tell all processes about a change that was committed."""
        self._waiting[f"{kind} {response_id}"] = None
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
                payloads, self._waiting = list(self._waiting), {}
                with suppress(AntiphonError):  # receivers then find the change at their next poll
                    await self._pool.submit(SEND, (self._channel, payloads))
        finally:
            self._sending = None

    async def _listen(self, connector: PostgresConnector) -> None:
        has_failed = False
        while True:
            try:
                await self._listen_until_lost(connector)
            except (*CONNECTION_ERRORS, asyncpg.PostgresError) as error:
                if not has_failed:
                    logger.warning("notifications are not received: %s", type(error).__name__)
                has_failed = True
            finally:
                self.is_listening = False
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _listen_until_lost(self, connector: PostgresConnector) -> None:
        connection = await connector.connect()
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        try:
            await connection.add_listener(self._channel, self._receive)
            self.is_listening = True
            # Notifications of the time before are lost. Let all readers check once.
            self._on_change("reconnected", "")
            while not lost.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_SECONDS):
                        await lost.wait()
                if not lost.is_set():
                    await connection.execute("SELECT 1")
        finally:
            self.is_listening = False
            await close(connection)

    def _receive(self, connection: "Connection[Any]", process: int, channel: str, payload: object) -> None:
        kind, _, response_id = str(payload).partition(" ")
        self._on_change(kind, response_id)


def _ignore_change(kind: str, response_id: str) -> None:
    pass
