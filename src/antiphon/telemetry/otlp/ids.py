"""Random ids of traces and spans. Many are made at once, because that takes a fifth of the time."""

import os
import struct

_COUNT = 256
_IDS = struct.Struct("16s8s")

UNUSED: list[tuple[bytes, bytes]] = []
"""Pairs of ids: of a new trace, and of its first span. Other spans use only the second one.

Zero is not a valid id. The probability of it, 2^-64, is not worth a check.
"""


def make_ids() -> tuple[bytes, bytes]:
    """Make new pairs, and take one of them."""
    made = list(_IDS.iter_unpack(os.urandom(_COUNT * _IDS.size)))
    taken = made.pop()
    UNUSED.extend(made)
    return taken


# A child process must not use the ids of its parent.
os.register_at_fork(after_in_child=UNUSED.clear)
