"""Keys of the items of one turn. A turn may have several answers, and each numbers its items anew."""

import msgspec

from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

Key = int | str


def make_key(key: Key, answer: int) -> Key:
    """Return a key that no other answer of the turn uses. `answer` is the number of the answer, from 0."""
    return key if answer == 0 else f"{answer} {key}"


def rename_key(delta: Delta, answer: int) -> Delta:
    """Return the delta with such a key, if it has one."""
    if answer == 0 or not isinstance(delta, deltas.KEYED_TYPES) or delta.key is None:
        return delta
    return msgspec.structs.replace(delta, key=make_key(delta.key, answer))
