"""The positions of the items in large stored arrays, so that a page of one is read without the rest.

An index has 16 bytes for each item. It is made when the array is read for the first time, and the array of a response
never changes.
"""

from array import array
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from antiphon.errors import InvalidRequest
from antiphon.store.base import Order

_MAX_INDEXES = 256
_MAX_ITEMS = 1_000_000
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])


class _Identified(msgspec.Struct):
    id: str | None = None


_IDS = msgspec.json.Decoder(list[_Identified])


class PageSlice(NamedTuple):
    """The bytes of the items of a page, from `start` to `end`, without the brackets of the array."""

    start: int
    end: int
    has_more: bool


class ItemOffsets:
    """The start of each item in an encoded array, its end, and the hash of each id."""

    def __init__(self, starts: "array[int]", hashes: "array[int]") -> None:
        self._starts = starts
        self._hashes = hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def find_page(self, *, after: str | None, limit: int, order: Order) -> PageSlice:
        """Return the location of a page. Raises InvalidRequest if no item has the id `after`."""
        count = len(self)
        passed = 0 if after is None else self._find(after, order) + 1
        taken = min(limit, count - passed)
        first = passed if order == "asc" else count - passed - taken
        starts = self._starts
        return PageSlice(starts[first], starts[first + taken] - 1 if taken else starts[first], passed + taken < count)

    def _find(self, item_id: str, order: Order) -> int:
        """Return the index of the first item with this id, in the order of the list."""
        hashes = self._hashes if order == "asc" else self._hashes[::-1]
        try:
            return hashes.index(hash(item_id))
        except ValueError:
            raise make_unknown_item_error(item_id) from None


def make_unknown_item_error(item_id: str) -> InvalidRequest:
    return InvalidRequest(f"No item with id '{item_id}' in this list.", param="after", code="invalid_value")


def build_offsets(items: bytes) -> ItemOffsets | None:
    """Return the offsets of an array. None if it is damaged, or has white space between its items."""
    try:
        elements = _ELEMENTS.decode(items)
        ids = [element.id for element in _IDS.decode(items)]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    starts = array("q", [1])
    for element in elements:
        starts.append(starts[-1] + len(bytes(element)) + 1)
    if not elements or starts[-1] != len(items) or len(elements) > _MAX_ITEMS:
        return None
    return ItemOffsets(starts, array("q", [0 if each is None else hash(each) for each in ids]))


class OffsetCache:
    """The offsets of the arrays that were read last, by project and id of the response."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[tuple[str, str], ItemOffsets] = OrderedDict()
        self._items = 0

    def find(self, key: tuple[str, str]) -> ItemOffsets | None:
        found = self._indexes.get(key)
        if found is not None:
            self._indexes.move_to_end(key)
        return found

    def add(self, key: tuple[str, str], offsets: ItemOffsets) -> None:
        self.remove(key)
        self._indexes[key] = offsets
        self._items += len(offsets)
        while self._items > _MAX_ITEMS or len(self._indexes) > _MAX_INDEXES:
            self.remove(next(iter(self._indexes)))

    def remove(self, key: tuple[str, str]) -> None:
        removed = self._indexes.pop(key, None)
        if removed is not None:
            self._items -= len(removed)
