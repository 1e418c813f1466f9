"""All open connections: their limits, and the choice of connections to close when there are too many."""

import asyncio
import ipaddress
import logging
from collections.abc import Collection
from typing import Protocol

from antiphon.config.settings import Settings
from antiphon.errors import Unavailable
from antiphon.server.body_budget import BodyBudget

# A new connection has this time to present a key before it can be closed in favour of others. Many clients may connect
# at once.
_GRACE_SECONDS = 1.0
# At the limit, this share of the connections is closed at once: finding candidates takes a pass over all connections.
_EVICTED_PART = 0.05
_RETRY_AFTER_SECONDS = 5.0
_LOG_SECONDS = 60.0

logger = logging.getLogger(__name__)


class OpenConnection(Protocol):
    """A connection of a client."""

    @property
    def address(self) -> str:
        """The client's address."""

    @property
    def accepted_at(self) -> float:
        """The time of the event loop when the connection was accepted."""

    def find_eviction_order(self) -> tuple[bool, float] | None:
        """Return the sort key among the connections to close, or None while the server works for this client."""

    def evict(self) -> None:
        """Close the connection, because there are too many."""


class ConnectionTable:
    """Limits connections, and among them those that have not presented a valid key.

    Connections over a limit for unauthenticated ones are closed after a second: the oldest ones of the address that has
    the most. So a client with a key can always connect. At the limit of all connections, idle ones are closed, then
    those with an incomplete request; a new connection is refused only if the server works for all others.
    """

    def __init__(self, *, max_total: int, max_unauthenticated: int, max_per_address: int, has_keys: bool) -> None:
        self.max_total = max_total
        self.max_unauthenticated = max_unauthenticated
        self.max_per_address = max_per_address
        # Without keys, a connection counts as authenticated when the head of its first request is complete.
        self.has_keys = has_keys
        self.unauthenticated = 0
        self._by_address: dict[str, dict[OpenConnection, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._evicted = 0
        self._next_log_at = 0.0

    def require_keys(self) -> None:
        """Count connections as authenticated only once they have presented a valid key."""
        self.has_keys = True

    def add(self, connection: OpenConnection, connections: Collection[object]) -> bool:
        """Add a new connection. `connections` are all open ones. Return False if it must be refused."""
        same = self._by_address.setdefault(connection.address, {})
        same[connection] = None
        self.unauthenticated += 1
        if len(same) > self.max_per_address or self.unauthenticated > self.max_unauthenticated:
            self._schedule_check()
        return len(connections) <= self.max_total or self._make_room(connection, connections)

    def admit(self, connection: OpenConnection) -> None:
        """Remove a connection from the unauthenticated ones. It may be called again."""
        same = self._by_address.get(connection.address)
        if same is not None and connection in same:
            del same[connection]
            self.unauthenticated -= 1
            if not same:
                del self._by_address[connection.address]

    def replace(self, connection: OpenConnection, successor: OpenConnection) -> None:
        """Let an upgraded connection take the place of an unauthenticated one."""
        same = self._by_address.get(connection.address)
        if same is not None and connection in same:
            del same[connection]
            same[successor] = None

    def _schedule_check(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._close_excess)

    def _close_excess(self) -> None:
        self._timer = None
        newest = asyncio.get_running_loop().time() - _GRACE_SECONDS
        for same in tuple(self._by_address.values()):
            while len(same) > self.max_per_address and self._evict_oldest(same, newest):
                pass
        while self.unauthenticated > self.max_unauthenticated:
            if not self._evict_oldest(max(self._by_address.values(), key=len), newest):
                break
        self._log_evictions()
        largest = max(map(len, self._by_address.values()), default=0)
        if largest > self.max_per_address or self.unauthenticated > self.max_unauthenticated:
            self._schedule_check()

    def _evict_oldest(self, same: dict[OpenConnection, None], newest: float) -> bool:
        oldest = next(iter(same))
        if oldest.accepted_at > newest:
            return False
        self.admit(oldest)
        oldest.evict()
        self._evicted += 1
        return True

    def _make_room(self, newcomer: OpenConnection, connections: Collection[object]) -> bool:
        candidates = [
            (order, connection)
            for connection in connections
            if connection is not newcomer and (order := connection.find_eviction_order()) is not None  # type: ignore[attr-defined]  # uvicorn's set
        ]
        candidates.sort(key=lambda candidate: candidate[0])
        for _, connection in candidates[: max(1, int(self.max_total * _EVICTED_PART))]:
            connection.evict()  # type: ignore[attr-defined]
            self._evicted += 1
        self._evicted += not candidates
        self._log_evictions()
        return bool(candidates)

    def _log_evictions(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._evicted and now >= self._next_log_at:
            self._next_log_at = now + _LOG_SECONDS
            logger.warning(
                "too many connections: closed %d. The limits are max_connections (%d), max_unauthenticated (%d) and "
                "max_unauthenticated_per_address (%d).",
                self._evicted,
                self.max_total,
                self.max_unauthenticated,
                self.max_per_address,
            )
            self._evicted = 0


class ServerLimits:
    """The settings and the state that all connections of a server share.

    When the server stops, `is_stopping` is set, and idle connections are closed after `linger_seconds`.
    """

    is_stopping = False
    linger_seconds = 0.0

    def __init__(self, settings: Settings, bodies: BodyBudget) -> None:
        self.bodies = bodies
        self.connections = ConnectionTable(
            max_total=settings.max_connections,
            max_unauthenticated=settings.max_unauthenticated,
            max_per_address=settings.max_unauthenticated_per_address,
            has_keys=bool(settings.api_keys),  # set later if the store has keys
        )
        self.apply_settings(settings)

    def apply_settings(self, settings: Settings) -> None:
        """Use new settings for the next connections."""
        self.settings = settings
        self.connections.max_total = settings.max_connections
        self.connections.max_unauthenticated = settings.max_unauthenticated
        self.connections.max_per_address = settings.max_unauthenticated_per_address
        self.min_body_bytes = compute_min_bytes(settings, settings.body_timeout_seconds)


def compute_min_bytes(settings: Settings, seconds: float) -> float:
    """Return the number of bytes that a peer must transfer in this time. With fewer, it counts as stalled."""
    return max(1.0, settings.min_bytes_per_second * seconds)


def find_address_key(client: tuple[str, int] | None) -> str:
    """Return the address that limits apply to. An IPv6 client usually has a whole /64 network."""
    if client is None:
        return ""
    host = client[0]
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or int(address) >> 64)


def make_overload_error() -> Unavailable:
    return Unavailable(
        "Too many connections: see the settings max_connections and max_unauthenticated.",
        code="server_overloaded",
        retry_after=_RETRY_AFTER_SECONDS,
    )
