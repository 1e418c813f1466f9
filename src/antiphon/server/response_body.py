"""Large response bodies, shared by all requests that send the same bytes at the same time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from antiphon.server.body_budget import BodyBudget, BodyShare

# Smaller bodies are not shared: they fit into the buffers of a connection.
MIN_BYTES = 256 * 1024


class SharedBody:
    """A body in memory. It exists while a request sends it, and counts once in the budget for bodies."""

    __slots__ = ("__weakref__", "_readers", "_share", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._share: BodyShare | None = None
        self._readers: set[BodyShare] = set()

    @contextmanager
    def sending(self, budget: BodyBudget, project: str, count_read: Callable[[], int]) -> Iterator[None]:
        """Send the body to a client within this context. Raises Unavailable if there is no room in the budget.

        Raises BodyDropped if others need the room, and all clients of this body read slowly. `count_read` returns the
        number of bytes that the client has read so far.
        """
        share = self._share if self._readers else None
        if share is None:
            share = self._share = budget.open(self._drop, project=project, is_slow=self._is_slow)
            # A body that is larger than the budget is sent if it is the only one.
            if not share.resize(len(self.data), is_required=not budget.used):
                self._share = None
                raise budget.make_error()
        reader = budget.open()  # of no size: it only measures the rate
        readers = self._readers
        readers.add(reader)
        try:
            with reader.sending(count_read):
                yield
        finally:
            readers.discard(reader)
            if not readers:
                share.close()
                # Body and share refer to each other. Without this, the data would wait for the garbage collector.
                if self._share is share:
                    self._share = None

    def _is_slow(self) -> bool:
        now = time.monotonic()
        return all(reader.is_slow(now) for reader in self._readers)

    def _drop(self) -> None:
        # A request that comes now begins with a new share.
        readers, self._readers = self._readers, set()
        for reader in readers:
            reader.drop()


class SharedBodies:
    """The large bodies that are being sent."""

    def __init__(self) -> None:
        self._bodies: WeakValueDictionary[int, SharedBody] = WeakValueDictionary()

    def share(self, data: bytes) -> SharedBody:
        """Return the body with these bytes: one that is being sent, or else a new one."""
        key = hash(data)
        body = self._bodies.get(key)
        if body is None or body.data != data:
            body = self._bodies[key] = SharedBody(data)
        return body
