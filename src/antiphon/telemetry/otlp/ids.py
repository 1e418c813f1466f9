"""Random ids of traces and spans. Many are made at once, in loops that run in C."""

import os
import struct
from binascii import hexlify
from operator import add

_COUNT = 256
_IDS = struct.Struct("16s8s8s")
# The ids of the trace and of the model call, in hex.
_HEX_IDS = struct.Struct("32s16x16s" * _COUNT)
# The trace is sampled, and its id is random.
_HEADER = b"traceparent: 00-%b-%b-03\r\n"
_HEADERS = _HEADER * _COUNT
_LINE = struct.Struct(f"{len(_HEADER % (bytes(32), bytes(16)))}s")
_LINE_ENDS = [b"-%02x\r\n" % flags for flags in range(256)]

NewIds = tuple[bytes, bytes, bytes, bytes]
"""The ids of a new trace, of its first span, and of the first model call below it, with the header of this call.

Spans that continue a trace use only the second id.
"""

UNUSED: list[NewIds] = []
"""New ids. Zero is not a valid id. The probability of it, 2^-64, is not worth a check."""


def make_ids() -> NewIds:
    """Make new ids, and take the first of them."""
    random = os.urandom(_COUNT * _IDS.size)
    headers = _HEADERS % _HEX_IDS.unpack(hexlify(random))
    made: list[NewIds] = list(map(add, _IDS.iter_unpack(random), _LINE.iter_unpack(headers)))
    taken = made.pop()
    UNUSED.extend(made)
    return taken


def encode_traceparent(trace_id: bytes, span_id: bytes, flags: int) -> bytes:
    """Return the line of the header `traceparent`."""
    # A group has 16 bytes: the hyphen is between the ids.
    return b"traceparent: 00-" + hexlify(trace_id + span_id, b"-", -16) + _LINE_ENDS[flags]


def read_span_id(header: bytes) -> str:
    """Return the id of the span, in hex, in the line of a `traceparent`."""
    return header.split(b"-")[2].decode()


# A child process must not use the ids of its parent.
os.register_at_fork(after_in_child=UNUSED.clear)
