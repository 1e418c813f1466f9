"""Reading and writing of ONNX files, as far as the local embedding model needs it.

The format is that of Protocol Buffers. Its library would be a further package, and only a few of its fields are needed.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_SIZES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
# Numbers of element types, and their names in NumPy. The stored bytes are little-endian.
_ELEMENT_TYPES = {1: "<f4", 2: "|u1", 3: "|i1", 7: "<i8"}
_TYPE_NUMBERS = {name: number for number, name in _ELEMENT_TYPES.items()}
_FLOAT, _INT = 1, 2


class Node(NamedTuple):
    """A call of an operator. Attributes are integers and floats."""

    operator: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, float] = {}
    domain: str = ""


class Graph(NamedTuple):
    """The nodes of a file and its constants, which are NumPy arrays."""

    nodes: list[Node]
    constants: dict[str, Any]


def read_graph(data: bytes) -> Graph:
    """Return the graph of a file, without attributes. Constants of types that are not known here are skipped."""
    graph = next(value for number, value in _read_fields(memoryview(data)) if number == 7)
    nodes: list[Node] = []
    constants: dict[str, Any] = {}
    for number, value in _read_fields(graph):
        if number == 1:
            nodes.append(_read_node(value))
        elif number == 5:
            constants.update(_read_constant(value))
    return Graph(nodes, constants)


def write_model(
    graph: Graph, *, inputs: Mapping[str, str], outputs: Mapping[str, str], domains: dict[str, int]
) -> bytes:
    """Return a file. `inputs` and `outputs` map names to element types, `domains` operators to their versions."""
    parts = [_write_bytes(1, _write_node(node)) for node in graph.nodes]
    parts.append(_write_bytes(2, b"graph"))
    parts += [_write_bytes(5, _write_constant(name, array)) for name, array in graph.constants.items()]
    parts += [_write_bytes(11, _write_value(name, kind)) for name, kind in inputs.items()]
    parts += [_write_bytes(12, _write_value(name, kind)) for name, kind in outputs.items()]
    versions = [
        _write_bytes(8, _write_bytes(1, domain.encode()) + _write_int(2, version))
        for domain, version in domains.items()
    ]
    return b"".join((_write_int(1, 9), _write_bytes(7, b"".join(parts)), *versions))


def _read_node(data: memoryview) -> Node:
    fields: dict[int, list[str]] = {1: [], 2: [], 4: []}
    for number, value in _read_fields(data):
        if number in fields:
            fields[number].append(str(value, "utf-8"))
    return Node(fields[4][0], fields[1], fields[2])


def _read_constant(data: memoryview) -> dict[str, Any]:
    import numpy as np

    shape: list[int] = []
    name, kind, content = "", 0, memoryview(b"")
    for number, value in _read_fields(data):
        if number == 1:
            shape += [value] if isinstance(value, int) else _read_packed(value)
        elif number == 2:
            kind = value
        elif number == 8:
            name = str(value, "utf-8")
        elif number == 9:
            content = value
    if kind not in _ELEMENT_TYPES or not content:
        return {}
    return {name: np.frombuffer(content, dtype=_ELEMENT_TYPES[kind]).reshape(shape)}


def _read_fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: their number, and an integer or bytes. Raises LookupError if it is damaged."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, position = _read_varint(data, position)
            yield number, value
            continue
        if kind == _BYTES:
            size, position = _read_varint(data, position)
        else:
            size = _FIXED_SIZES[kind]
        if position + size > len(data):
            raise IndexError("the file is cut off")
        yield number, data[position : position + size]
        position += size


def _read_packed(data: memoryview) -> list[int]:
    values: list[int] = []
    position = 0
    while position < len(data):
        value, position = _read_varint(data, position)
        values.append(value)
    return values


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def _write_node(node: Node) -> bytes:
    parts = [_write_bytes(1, name.encode()) for name in node.inputs]
    parts += [_write_bytes(2, name.encode()) for name in node.outputs]
    parts.append(_write_bytes(4, node.operator.encode()))
    parts += [_write_bytes(5, _write_attribute(name, value)) for name, value in node.attributes.items()]
    return b"".join((*parts, _write_bytes(7, node.domain.encode())))


def _write_attribute(name: str, value: float) -> bytes:
    head = _write_bytes(1, name.encode())
    if isinstance(value, int):
        return head + _write_int(3, value) + _write_int(20, _INT)
    return head + _write_tag(2, _FOUR_BYTES) + struct.pack("<f", value) + _write_int(20, _FLOAT)


def _write_constant(name: str, array: Any) -> bytes:
    shape = b"".join(_write_int(1, size) for size in array.shape)
    kind = _write_int(2, _TYPE_NUMBERS[array.dtype.str])
    return shape + kind + _write_bytes(8, name.encode()) + _write_bytes(9, array.tobytes())


def _write_value(name: str, kind: str) -> bytes:
    """Return an input or output of the graph, whose shape is not stated."""
    tensor = _write_int(1, _TYPE_NUMBERS[kind])
    return _write_bytes(1, name.encode()) + _write_bytes(2, _write_bytes(1, tensor))


def _write_bytes(number: int, data: bytes) -> bytes:
    return _write_tag(number, _BYTES) + _write_varint(len(data)) + data


def _write_int(number: int, value: int) -> bytes:
    return _write_tag(number, _VARINT) + _write_varint(value & (1 << 64) - 1)


def _write_tag(number: int, kind: int) -> bytes:
    return _write_varint(number << 3 | kind)


def _write_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
