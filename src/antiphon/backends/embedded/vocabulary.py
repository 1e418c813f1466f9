"""The tokens of a model, read from its GGUF file without loading it."""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from antiphon.grammars.messages import Vocabulary

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# Formats of the value types of GGUF.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_CONTROL_TOKEN = 3
_MAX_LENGTH = 1 << 27
_SPECIAL = b"\xff"


class GgufError(Exception):
    """A file is not a GGUF file, or it has no tokens."""


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the tokens from the header of a GGUF file. Raises GgufError or OSError."""
    with path.open("rb") as file:
        try:
            fields = _read_fields(file)
        except (struct.error, KeyError, UnicodeDecodeError, MemoryError) as error:
            raise GgufError(f"{path} cannot be read: {error}") from None
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise GgufError(f"{path} has no tokens.")
    kinds = fields.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    decode = _decode_bpe if fields.get("tokenizer.ggml.model") == "gpt2" else _decode_sentencepiece
    decoded = [
        _SPECIAL + token.encode() if kind == _CONTROL_TOKEN else decode(token)
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return Vocabulary(decoded, int(fields.get("tokenizer.ggml.eos_token_id", 0)))


def _read_fields(file: BinaryIO) -> dict[str, Any]:
    if file.read(4) != _MAGIC:
        raise GgufError("It is not a GGUF file.")
    _, _, count = struct.unpack("<IQQ", file.read(20))
    fields: dict[str, Any] = {}
    for _ in range(count):
        name = _read_string(file)
        (kind,) = struct.unpack("<I", file.read(4))
        fields[name] = _read_value(file, kind)
    return fields


def _read_string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(min(length, _MAX_LENGTH)).decode(errors="replace")


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        (value,) = struct.unpack(f"<{_FORMATS[kind]}", file.read(struct.calcsize(_FORMATS[kind])))
        return value
    inner, count = struct.unpack("<IQ", file.read(12))
    if inner in (_STRING, _ARRAY):
        return [_read_value(file, inner) for _ in range(count)]
    layout = f"<{count}{_FORMATS[inner]}"
    return list(struct.unpack(layout, file.read(min(struct.calcsize(layout), _MAX_LENGTH))))


def _make_byte_table() -> dict[str, int]:
    """Return the byte of each character in the tokens of byte-level BPE: unprintable bytes are moved up from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTES = _make_byte_table()


def _decode_bpe(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:
        return token.encode()


def _decode_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
