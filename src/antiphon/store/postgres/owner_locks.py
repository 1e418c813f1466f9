"""Detection of owners of runs whose process has ended.

Each owner holds an advisory lock on the connection that listens (`notifications.py`). PostgreSQL releases it when the
connection ends, and so at once when the process is killed. Its runs name the owner as `locked_owner` while it holds the
lock. If such an owner has no lock for some time, others end its leases.

An owner without such a connection, or whose lock the database does not show, leaves `locked_owner` empty: then only the
expiry of its leases counts. A process that is suspended, or whose machine is cut off, keeps its lock.
"""

import math
import time
from typing import NamedTuple

from antiphon.store.postgres.notifications import HELD_LOCKS, OWNER_LOCK_KEY, Notifications
from antiphon.store.postgres.pool import PostgresPool

# Minimum interval between checks.
CHECK_SECONDS = 0.5
# Time for an owner that has lost its connection to open another one, or to record that it has none.
GRACE_SECONDS = 2.0
# Time after a new connection of this process for which others may not have theirs yet: the server may have restarted.
SETTLE_SECONDS = 3.0

# The owners without a lock: this one, and others with a lease whose runs name them as locked. Each step of `walked` is
# one search in the index.
UNLOCKED = f"""
WITH RECURSIVE walked (owner) AS (
    SELECT min(owner) FROM runs WHERE owner > ''
    UNION ALL
    SELECT (SELECT min(owner) FROM runs WHERE owner > walked.owner) FROM walked WHERE walked.owner IS NOT NULL
), checked (owner) AS (
    SELECT $2::text
    UNION ALL
    SELECT owner FROM walked WHERE owner <> $2 AND EXISTS (
        SELECT 1 FROM runs WHERE runs.owner = walked.owner AND locked_owner = walked.owner
            AND leased_until > coalesce($3::float8, extract(epoch FROM clock_timestamp())::float8)
    )
)
SELECT owner FROM checked WHERE {OWNER_LOCK_KEY} NOT IN (SELECT key FROM ({HELD_LOCKS}) AS held)
"""


class OwnerCheck(NamedTuple):
    """The result of a check: whether this owner's lock is held, and the other owners that have ended."""

    is_locked: bool
    ended: list[str]


class OwnerLocks:
    """The locks of the owners that share a database, as this process last saw them."""

    def __init__(self) -> None:
        self._checked_at = -math.inf
        self._unlocked: dict[str, float] = {}  # other owners, and the time of the first check without their lock
        self._recorded: set[str] = set()

    def is_recorded(self, owner: str) -> bool:
        """Return True if the runs of this owner name it as locked."""
        return owner in self._recorded

    def record(self, owner: str, *, is_locked: bool) -> None:
        (self._recorded.add if is_locked else self._recorded.discard)(owner)

    async def check(
        self, owner: str, notifications: Notifications, pool: PostgresPool, *, clock: float | None, after_outage: bool
    ) -> OwnerCheck | None:
        """Hold this owner's lock, and look for those of others. None if the last check was a moment ago.

        A process whose own lock is not held, or is new, does not judge others, nor does one after an outage.
        """
        notifications.hold_lock(owner)
        if owner not in notifications.locked_owners:
            self._unlocked.clear()
            return OwnerCheck(is_locked=False, ended=[])
        began_at = time.monotonic()
        if began_at - self._checked_at < CHECK_SECONDS:
            return None
        self._checked_at = began_at
        unlocked = {row[0] for row in await pool.submit(UNLOCKED, (notifications.channel, owner, clock))}
        is_settled = began_at - notifications.listening_since >= SETTLE_SECONDS
        if owner in unlocked or after_outage or not is_settled:
            self._unlocked.clear()
            return OwnerCheck(owner not in unlocked, ended=[])
        now = time.monotonic()
        self._unlocked = {other: self._unlocked.get(other, now) for other in unlocked}
        ended = [other for other, since in self._unlocked.items() if began_at - since >= GRACE_SECONDS]
        return OwnerCheck(is_locked=True, ended=ended)
