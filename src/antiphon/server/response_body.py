"""Large response bodies, shared by all requests that send the same bytes at the same time."""

from weakref import WeakValueDictionary

# Smaller bodies are not shared: they fit into the buffers of a connection.
MIN_BYTES = 256 * 1024


class SharedBody:
    """A body in memory. It exists while a request sends it."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


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
