"""The budget for histories: the memory of stored items that requests in progress have loaded.

A history counts from the time before it is read until its response has ended. A large response of a chain that several
requests continue at the same time is decoded once, and counts once.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from antiphon.errors import InvalidRequest, Unavailable
from antiphon.offload import LARGE_BYTES, run_sized
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Link
from antiphon.store.memory_size import measure_items
from antiphon.store.record import measure_texts, unpack_items

FREE_BYTES = 64 * 1024
"""The first bytes of each history are free, so that usual requests continue while large ones exhaust the budget."""

UNRESERVED_BYTES = 1024 * 1024
"""Size of the stored items that are read before their memory is reserved, because their size is not known yet."""

UNLIMITED = 2**62

# Memory for a byte of stored JSON: the decoded items, and the copies of them that are made for an upstream.
_DECODED = 2
_COPIES = 2

_WAIT_SECONDS = 10.0
_RETRY_AFTER_SECONDS = 5.0

LinkKey = tuple[str, str, int]
"""The project and the id of a response, and the revision of the project."""


class HistoryBudgetExhausted(Unavailable):
    """There is no memory for a history now."""


class HistoryBudget:
    """Counts the memory of histories over all requests. A project can take at most three quarters of it."""

    def __init__(self, max_bytes: int | float = math.inf, wait_seconds: float = _WAIT_SECONDS) -> None:
        self.max_bytes = max_bytes
        self.wait_seconds = wait_seconds
        self.used = 0
        self._by_project: dict[str, int] = {}
        self._waiting: list[_Waiter] = []
        self._links: dict[LinkKey, _SharedLink] = {}

    def reconfigure(self, max_bytes: int, *, wait_seconds: float) -> None:
        """Change the limits. Shares that are open stay."""
        self.max_bytes, self.wait_seconds = max_bytes, wait_seconds
        self._grant()

    def open(self, project: str) -> "HistoryShare":
        """Return the share of a new request."""
        return HistoryShare(self, project)

    def _make_error(self) -> HistoryBudgetExhausted:
        return HistoryBudgetExhausted(
            "The server holds too many histories in memory: their total exceeds history_budget_bytes "
            f"({self.max_bytes}), or three quarters of it in one project. Send the request again later.",
            code="server_overloaded",
            retry_after=_RETRY_AFTER_SECONDS,
        )

    async def _acquire(self, project: str, size: int, held: int) -> bool:
        """Count more bytes of a project when there is room for them. Return False if there is none for too long.

        `held` are the bytes that the same request counts already.
        """
        if self._fits(project, size, held) and not any(self._is_before(each, project) for each in self._waiting):
            self._count(project, size)
            return True
        waiter = _Waiter(project, size, held)
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self.wait_seconds):
                await waiter.granted
        except TimeoutError:  # the grant may have come at the same time
            return waiter.is_granted
        except BaseException:
            if waiter.is_granted:
                self._count(project, -size)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._grant()  # later requests, which had to wait behind this one, may fit
        return True

    def _fits(self, project: str, size: int, held: int) -> bool:
        return self.used + size <= self.max_bytes and self._fits_project(project, size, held)

    def _fits_project(self, project: str, size: int, held: int) -> bool:
        """Return True if the project stays within its limit, or has no other request."""
        own = self._by_project.get(project, 0)
        return own <= held or own + size <= self.max_bytes * 3 / 4

    def _is_before(self, waiter: "_Waiter", project: str) -> bool:
        """Return True if a new request of a project must wait behind this one.

        A request that waits only for memory of its own project lets requests of other projects pass.
        """
        return waiter.project == project or self._fits_project(waiter.project, waiter.size, waiter.held)

    def _count(self, project: str, size: int) -> None:
        self.used += size
        own = self._by_project.get(project, 0) + size
        if own:
            self._by_project[project] = own
        else:
            self._by_project.pop(project, None)
        if size < 0 and self._waiting:
            self._grant()

    def _grant(self) -> None:
        """Grant the requests that wait and fit now, the oldest first."""
        for waiter in tuple(self._waiting):
            if not waiter.granted.done() and self._fits(waiter.project, waiter.size, waiter.held):
                self._waiting.remove(waiter)
                self._count(waiter.project, waiter.size)
                waiter.granted.set_result(None)


async def decode_history(
    conversation_id: str, contents: Sequence[bytes], share: "HistoryShare | None"
) -> list[Item | Unknown]:
    """Decode the items of a conversation. Their memory was reserved in the share by an estimate."""
    size = measure_texts(contents)
    if share is None or size <= LARGE_BYTES:
        return await run_sized(size, unpack_items, conversation_id, contents)
    items, memory = await run_sized(size, _unpack_measured, conversation_id, contents)
    share.settle(size, memory)
    return items


def _unpack_measured(conversation_id: str, contents: Sequence[bytes]) -> tuple[list[Item | Unknown], int]:
    items = unpack_items(conversation_id, contents)
    return items, measure_items(items)


async def reserve_items(items: dict[str, Item | Unknown], share: "HistoryShare | None") -> dict[str, Item | Unknown]:
    """Reserve the memory of items that were loaded, and return them."""
    if share is not None and items:
        await share.reserve(0, decoded=measure_items(items.values()))
    return items


class _Waiter:
    __slots__ = ("granted", "held", "project", "size")

    def __init__(self, project: str, size: int, held: int) -> None:
        self.project = project
        self.size = size
        self.held = held
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_granted(self) -> bool:
        return self.granted.done() and not self.granted.cancelled()


class _SharedLink:
    __slots__ = ("link", "memory", "size", "users")

    def __init__(self, link: Link, size: int, memory: int) -> None:
        self.link = link
        self.size = size
        self.memory = memory
        self.users = 0


class HistoryShare:
    """One request's share of the budget. `close` returns it.

    `param` is the field of the request that names the history.
    """

    __slots__ = ("_budget", "_links", "_project", "_size", "param")

    def __init__(self, budget: HistoryBudget, project: str) -> None:
        self._budget = budget
        self._project = project
        self._size = 0
        self._links: dict[LinkKey, _SharedLink] = {}
        self.param = "input"

    def __enter__(self) -> "HistoryShare":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def reserve(self, size: int, *, decoded: int = 0) -> None:
        """Reserve the memory for `size` bytes of stored JSON.

        `decoded` are bytes of items that are decoded already: only the copies of them are new. Raises Unavailable if
        there is no room for too long, and InvalidRequest if there never will be.
        """
        await self._reserve((_DECODED + _COPIES) * size + _COPIES * decoded)

    async def reserve_request(self, size: int) -> None:
        """Reserve the memory for a stored request. It is never too large: a request that was accepted is served."""
        memory = (_DECODED + _COPIES) * size
        await self._reserve(int(min(memory, self._budget.max_bytes)))

    async def _reserve(self, memory: int) -> None:
        growth = self._measure_growth(memory)
        budget = self._budget
        shared = sum(entry.memory for entry in self._links.values())
        total = shared + self._size + memory
        if total - FREE_BYTES > budget.max_bytes:
            raise InvalidRequest(
                f"The history is too large: it takes about {total} bytes of memory, and this server "
                f"allows {budget.max_bytes} for all requests (setting history_budget_bytes). Compact the history.",
                param=self.param,
                code="history_too_large",
            )
        held = shared + max(0, self._size - FREE_BYTES)
        if growth and not await budget._acquire(self._project, growth, held):
            raise budget._make_error()
        self._size += memory

    @asynccontextmanager
    async def hold(self, lock: asyncio.Lock) -> AsyncIterator[None]:
        """Hold a lock within this context. Raises Unavailable if it is not free for too long."""
        try:
            async with asyncio.timeout(self._budget.wait_seconds):
                await lock.acquire()
        except TimeoutError:
            raise self._budget._make_error() from None
        try:
            yield
        finally:
            lock.release()

    def settle(self, size: int, memory: int) -> None:
        """Replace the estimate for `size` bytes of JSON by the memory of the decoded items."""
        self._resize(memory - _DECODED * size)

    def find_link(self, key: LinkKey) -> Link | None:
        """Return a large link that a request in progress has loaded."""
        entry = self._links.get(key) or self._budget._links.get(key)
        if entry is None:
            return None
        self._use(key, entry)
        return entry.link

    def add_link(self, key: LinkKey, link: Link, size: int, memory: int) -> None:
        """Share a large link with other requests. Its memory counts once, instead of in each share."""
        self._resize(-_DECODED * size)
        budget = self._budget
        entry = budget._links.get(key)
        if entry is None:
            entry = budget._links[key] = _SharedLink(link, size, memory)
            budget._count(self._project, memory)
        self._use(key, entry)

    @property
    def is_used(self) -> bool:
        """True if memory was reserved."""
        return self._size > 0 or bool(self._links)

    @property
    def shared_size(self) -> int:
        """The size in JSON of the shared links in use."""
        return sum(entry.size for entry in self._links.values())

    def close(self) -> None:
        """Return the memory. It can be called again."""
        if self._size:
            self._resize(-self._size)
        for key, entry in self._links.items():
            entry.users -= 1
            if not entry.users:
                del self._budget._links[key]
                self._budget._count(self._project, -entry.memory)
        self._links.clear()

    def _use(self, key: LinkKey, entry: _SharedLink) -> None:
        if key not in self._links:
            self._links[key] = entry
            entry.users += 1

    def _measure_growth(self, memory: int) -> int:
        return max(0, self._size + memory - FREE_BYTES) - max(0, self._size - FREE_BYTES)

    def _resize(self, memory: int) -> None:
        growth = self._measure_growth(memory)
        self._size += memory
        if growth:
            self._budget._count(self._project, growth)
