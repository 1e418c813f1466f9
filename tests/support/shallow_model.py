"""The embedded model without most of its layers, for tests of everything but its judgement.

Vocabulary, chat template and file format are those of the whole model. A token costs a fourth, a prompt a tenth.
"""

import re
import struct
from pathlib import Path

from antiphon.backends.embedded.weights import DEFAULT_MODEL, find_weights

_BLOCK_COUNT = b"llama.block_count" + struct.pack("<I", 4)  # followed by the number
_FIRST_TENSOR = struct.pack("<Q", 17) + b"token_embd.weight"
_LAYER = re.compile(rb"blk\.(\d+)\.")
_COUNT_POSITION = 8  # of the number of tensors
_ALIGNMENT = 32


def write_shallow_model(path: Path, *, layers: int = 3) -> None:
    """Write a GGUF file with the first layers of the default model. Its texts make no sense."""
    data = find_weights(DEFAULT_MODEL).read_bytes()
    first = data.index(_FIRST_TENSOR)
    descriptions, offsets, end = _read_tensors(data, first)
    start = _align(end)
    limits = [*offsets[1:], len(data) - start]
    head, tensors, count = bytearray(data[:first]), bytearray(), 0
    for description, offset, limit in zip(descriptions, offsets, limits, strict=True):
        layer = _LAYER.search(description)
        if layer is None or int(layer[1]) < layers:
            head += description + struct.pack("<Q", len(tensors))
            tensors += data[start + offset : start + limit]
            count += 1
    struct.pack_into("<Q", head, _COUNT_POSITION, count)
    struct.pack_into("<I", head, head.index(_BLOCK_COUNT) + len(_BLOCK_COUNT), layers)
    path.write_bytes(head.ljust(_align(len(head)), b"\0") + tensors)


def _read_tensors(data: bytes, position: int) -> tuple[list[bytes], list[int], int]:
    """Return the descriptions of the tensors, their offsets in the order of the file, and the end of the list."""
    (count,) = struct.unpack_from("<Q", data, _COUNT_POSITION)
    descriptions, offsets = [], []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, position)
        (dimensions,) = struct.unpack_from("<I", data, position + 8 + length)
        end = position + 8 + length + 4 + 8 * dimensions + 4  # the name, the dimensions and the type
        descriptions.append(data[position:end])
        offsets += struct.unpack_from("<Q", data, end)
        position = end + 8
    return descriptions, offsets, position


def _align(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
