"""Tool lists of requests: decoded once for all requests that send the same bytes.

An agent sends the same tools with every request, and they are often the largest part of it. A decoded list is kept with
the values that were derived from it, so that a known list is neither decoded nor checked nor translated again.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar

from msgspec import Raw

from antiphon.protocol.tools import TOOLS, CustomTool, FunctionTool, Tool
from antiphon.protocol.unions import Unknown

T = TypeVar("T")

MAX_BYTES = 2**20
"""Maximum size of all cached lists: `LIST_BYTES` and the JSON of each. A decoded tool is several times as large as its
JSON.
"""

# Approximate size of a cached list and its derived values, without the tools: a client may send many small lists.
LIST_BYTES = 1000

# Only lists of these types are cached. Other tools may contain credentials, which must not stay in memory.
_CACHED_TYPES = frozenset({FunctionTool, CustomTool})


class SharedTools(list["Tool | Unknown"]):
    """A tool list that requests share. Neither the list nor its tools may be changed.

    `derived` has the values of `derive`, by key.
    """

    __slots__ = ("derived",)

    def __init__(self, tools: "list[Tool | Unknown]") -> None:
        super().__init__(tools)
        self.derived: dict[Hashable, Any] = {}


def derive(tools: "list[Tool | Unknown]", key: Hashable, make: "Callable[[list[Tool | Unknown]], T]") -> T:
    """Return `make(tools)`. For a shared list, it is computed only once for each key.

    The key must contain everything else that the value depends on, and must not be chosen by a client. The value must
    not be changed.
    """
    if type(tools) is not SharedTools:
        return make(tools)
    try:
        value: T = tools.derived[key]
    except KeyError:
        value = tools.derived[key] = make(tools)
    return value


class ToolListCache:
    """Decoded tool lists by their JSON. The least recently used lists are evicted first.

    A list depends on nothing but its bytes, so that requests of different projects can share it.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_list_bytes = max_bytes // 4  # one list must not evict all others
        self._lists: OrderedDict[bytes, SharedTools] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def decode_field(self, value: Any, name: str) -> Any:
        """Decode a field with an array of tools, as `OpenUnion.decode_list_field` does."""
        if not isinstance(value, Raw):
            return value
        raw = bytes(value)
        with self._lock:
            found = self._lists.get(raw)
            if found is not None:
                self._lists.move_to_end(raw)
                return found
        return self._add(raw, TOOLS.decode_list_field(value, name))

    def _add(self, raw: bytes, tools: "list[Tool | Unknown] | None") -> "list[Tool | Unknown] | None":
        if not tools or len(raw) > self._max_list_bytes or not _CACHED_TYPES.issuperset(map(type, tools)):
            return tools
        shared = SharedTools(tools)
        with self._lock:
            if raw not in self._lists:
                self._bytes += len(raw) + LIST_BYTES
            self._lists[raw] = shared
            while self._bytes > self._max_bytes:
                evicted, _ = self._lists.popitem(last=False)
                self._bytes -= len(evicted) + LIST_BYTES
        return shared

    def __len__(self) -> int:
        return len(self._lists)


TOOL_LISTS = ToolListCache()
