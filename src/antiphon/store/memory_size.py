"""The size of decoded items in memory.

The length of the JSON says little about it: one character outside the basic plane makes a text four times as long, and
a list of small objects takes up to ten times as much as its JSON.
"""

from collections.abc import Iterable
from sys import getsizeof

from msgspec import Struct
from msgspec.structs import astuple

from antiphon.protocol.content import InputText, OutputText
from antiphon.protocol.items import Message
from antiphon.protocol.unions import Unknown

# Values that are shared, or have no further parts.
_LEAVES = frozenset({str, bytes, int, float})
_SHARED = frozenset({type(None), bool})


def measure_items(items: Iterable[object]) -> int:
    """Return the number of bytes that items use in memory. Parts that occur several times are counted each time."""
    size = 0
    for item in items:
        if type(item) is Message:
            size += getsizeof(item) + getsizeof(item.id) + _measure_content(item.content)
        else:
            size += _measure(item)
    return size


def _measure_content(content: object) -> int:
    """Return the size of the content of a message. Most of it is text, which needs no search."""
    if type(content) is str:
        return getsizeof(content)
    if type(content) is not list:
        return _measure(content)
    size = getsizeof(content)
    for part in content:
        if type(part) is InputText and part.prompt_cache_breakpoint is None:
            size += getsizeof(part) + getsizeof(part.text)
        elif type(part) is OutputText and not part.annotations and not part.logprobs:
            size += getsizeof(part) + getsizeof(part.text) + getsizeof(part.annotations)
        else:
            size += _measure(part)
    return size


def _measure(value: object) -> int:
    size = 0
    pending = [value]
    while pending:
        part = pending.pop()
        kind = type(part)
        if kind in _SHARED:
            continue
        size += getsizeof(part)
        if kind in _LEAVES:
            continue
        if isinstance(part, Struct):
            pending += astuple(part)
        elif isinstance(part, dict):
            pending += part.keys()
            pending += part.values()
        elif isinstance(part, list | tuple):
            pending += part
        elif isinstance(part, Unknown):
            pending.append(part.raw)
    return size
