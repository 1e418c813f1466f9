"""Reading and writing of ONNX files, as far as the local embedding model needs it.

The format is that of Protocol Buffers. Its library would be a further package, and only a few of its fields are needed.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# The wire types of Protocol Buffers.
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_SIZES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
# Numbers of element types, and their names in NumPy. The stored bytes are little-endian.
_ELEMENT_TYPES = {1: "<f4", 2: "|u1", 3: "|i1", 7: "<i8"}
_TYPE_NUMBERS = {name: number for number, name in _ELEMENT_TYPES.items()}
_IR_VERSION = 9


# The numbers of the fields of each message, as in onnx.proto.
class _Model:
    IR_VERSION, GRAPH, OPSET_IMPORT = 1, 7, 8


class _OperatorSet:
    DOMAIN, VERSION = 1, 2


class _Graph:
    NODE, NAME, INITIALIZER, INPUT, OUTPUT = 1, 2, 5, 11, 12


class _Node:
    INPUT, OUTPUT, OP_TYPE, ATTRIBUTE, DOMAIN = 1, 2, 4, 5, 7


class _Attribute:
    NAME, FLOAT, INT, TYPE = 1, 2, 3, 20
    FLOAT_TYPE, INT_TYPE = 1, 2  # values of TYPE


class _Tensor:
    DIMS, DATA_TYPE, NAME, RAW_DATA = 1, 2, 8, 9


class _Value:
    NAME, TYPE, TENSOR_TYPE, ELEMENT_TYPE = 1, 2, 1, 1


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
    graph = next(value for number, value in _read_fields(memoryview(data)) if number == _Model.GRAPH)
    nodes: list[Node] = []
    constants: dict[str, Any] = {}
    for number, value in _read_fields(graph):
        if number == _Graph.NODE:
            nodes.append(_read_node(value))
        elif number == _Graph.INITIALIZER:
            constants.update(_read_constant(value))
    return Graph(nodes, constants)


def write_model(
    graph: Graph, *, inputs: Mapping[str, str], outputs: Mapping[str, str], domains: dict[str, int]
) -> bytes:
    """Return a file. `inputs` and `outputs` map names to element types, `domains` operators to their versions."""
    parts = [_write_bytes(_Graph.NODE, _write_node(node)) for node in graph.nodes]
    parts.append(_write_bytes(_Graph.NAME, b"graph"))
    parts += [_write_bytes(_Graph.INITIALIZER, _write_constant(name, array)) for name, array in graph.constants.items()]
    parts += [_write_bytes(_Graph.INPUT, _write_value(name, kind)) for name, kind in inputs.items()]
    parts += [_write_bytes(_Graph.OUTPUT, _write_value(name, kind)) for name, kind in outputs.items()]
    versions = [
        _write_bytes(_OperatorSet.DOMAIN, domain.encode()) + _write_int(_OperatorSet.VERSION, version)
        for domain, version in domains.items()
    ]
    return b"".join(
        (
            _write_int(_Model.IR_VERSION, _IR_VERSION),
            _write_bytes(_Model.GRAPH, b"".join(parts)),
            *(_write_bytes(_Model.OPSET_IMPORT, version) for version in versions),
        )
    )


def _read_node(data: memoryview) -> Node:
    fields: dict[int, list[str]] = {_Node.INPUT: [], _Node.OUTPUT: [], _Node.OP_TYPE: []}
    for number, value in _read_fields(data):
        if number in fields:
            fields[number].append(str(value, "utf-8"))
    return Node(fields[_Node.OP_TYPE][0], fields[_Node.INPUT], fields[_Node.OUTPUT])


def _read_constant(data: memoryview) -> dict[str, Any]:
    import numpy as np

    shape: list[int] = []
    name, kind, content = "", 0, memoryview(b"")
    for number, value in _read_fields(data):
        if number == _Tensor.DIMS:
            shape += [value] if isinstance(value, int) else _read_packed(value)
        elif number == _Tensor.DATA_TYPE:
            kind = value
        elif number == _Tensor.NAME:
            name = str(value, "utf-8")
        elif number == _Tensor.RAW_DATA:
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
    parts = [_write_bytes(_Node.INPUT, name.encode()) for name in node.inputs]
    parts += [_write_bytes(_Node.OUTPUT, name.encode()) for name in node.outputs]
    parts.append(_write_bytes(_Node.OP_TYPE, node.operator.encode()))
    parts += [_write_bytes(_Node.ATTRIBUTE, _write_attribute(name, value)) for name, value in node.attributes.items()]
    return b"".join((*parts, _write_bytes(_Node.DOMAIN, node.domain.encode())))


def _write_attribute(name: str, value: float) -> bytes:
    head = _write_bytes(_Attribute.NAME, name.encode())
    if isinstance(value, int):
        return head + _write_int(_Attribute.INT, value) + _write_int(_Attribute.TYPE, _Attribute.INT_TYPE)
    content = _write_tag(_Attribute.FLOAT, _FOUR_BYTES) + struct.pack("<f", value)
    return head + content + _write_int(_Attribute.TYPE, _Attribute.FLOAT_TYPE)


def _write_constant(name: str, array: Any) -> bytes:
    shape = b"".join(_write_int(_Tensor.DIMS, size) for size in array.shape)
    kind = _write_int(_Tensor.DATA_TYPE, _TYPE_NUMBERS[array.dtype.str])
    return shape + kind + _write_bytes(_Tensor.NAME, name.encode()) + _write_bytes(_Tensor.RAW_DATA, array.tobytes())


def _write_value(name: str, kind: str) -> bytes:
    """Return an input or output of the graph, whose shape is not stated."""
    tensor = _write_int(_Value.ELEMENT_TYPE, _TYPE_NUMBERS[kind])
    kinds = _write_bytes(_Value.TENSOR_TYPE, tensor)
    return _write_bytes(_Value.NAME, name.encode()) + _write_bytes(_Value.TYPE, kinds)


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
