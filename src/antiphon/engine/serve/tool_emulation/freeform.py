"""The free text input of a custom tool's call, decoded from function arguments while they stream."""

import json
import re
from typing import Any

_INPUT_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHITESPACE = re.compile(r"\s+")
_PIECE = re.compile(
    r'[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt]'
    r"|\\"
)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_MAX_ESCAPE_LENGTH = len(r"\ud83d\ude00")
_FENCE = re.compile(r"\s*```[^\n`]*\n(.*?)\n?```\s*", re.DOTALL)


class FreeformReader:
    """Reads the text in `{"input": "…"}` from fragments.

    Bare text without JSON is returned at once. Other JSON is decoded at the end, when its shape is known.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._buffered: list[str] = []
        self._read = self._read_start

    def feed(self, fragment: str) -> str:
        """Return the text decoded from this fragment and the pending ones."""
        self._pending += fragment
        return self._read()

    def close(self) -> str:
        """Return the rest of the text. Call this after the last fragment."""
        if self._read == self._read_string:
            return self._decode(lookahead=0)
        return "" if self._read == self._read_nothing else unwrap_json("".join([*self._buffered, self._pending]))

    def _read_start(self) -> str:
        start = _INPUT_START.match(self._pending)
        if start is not None:
            self._pending = self._pending[start.end() :]
            self._read = self._read_string
        elif '{"input":"'.startswith(_WHITESPACE.sub("", self._pending)):
            return ""
        else:
            is_json = self._pending.lstrip()[0] in '{"'
            self._read = self._read_other_json if is_json else self._read_bare
        return self._read()

    def _read_bare(self) -> str:
        text, self._pending = self._pending, ""
        return text

    def _read_other_json(self) -> str:
        self._buffered.append(self._pending)
        self._pending = ""
        return ""

    def _read_nothing(self) -> str:
        self._pending = ""
        return ""

    def _read_string(self) -> str:
        return self._decode(lookahead=_MAX_ESCAPE_LENGTH)

    def _decode(self, *, lookahead: int) -> str:
        """Decode up to the closing quote. An escape stays pending until `lookahead` characters are there."""
        text, start, decoded = self._pending, 0, []
        while start < len(text) and (text[start] != "\\" or len(text) - start >= lookahead):
            piece = _PIECE.match(text, start)
            if piece is None:  # the closing quote: ignore the rest
                self._read = self._read_nothing
                start = len(text)
                break
            decoded.append(_decode_piece(piece[0]))
            start = piece.end()
        self._pending = text[start:]
        return "".join(decoded)


def _decode_piece(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    if piece[1:2] == "u":
        code = int(piece[2:6], 16)
        if len(piece) > len(r"\ud83d"):
            return chr(0x10000 + ((code - 0xD800) << 10) + (int(piece[8:], 16) - 0xDC00))
        return "\N{REPLACEMENT CHARACTER}" if 0xD800 <= code < 0xE000 else chr(code)
    # A backslash before another character is one that the model did not escape.
    return _ESCAPES.get(piece[1:], piece[1:] or piece)


def unwrap_json(text: str) -> str:
    """Return the text inside JSON: the field `input`, the only string field, or a JSON string. Else the text itself."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if found == {}:  # a call without arguments
        return ""
    if isinstance(found, dict):
        texts = [value for value in found.values() if isinstance(value, str)]
        named = found.get("input")
        found = named if isinstance(named, str) else texts[0] if len(texts) == len(found) == 1 else None
    return _replace_surrogates(found) if isinstance(found, str) else text


def strip_fence(text: str) -> str:
    """Return the text without the code fence around all of it, if there is one."""
    fenced = _FENCE.fullmatch(text)
    return text if fenced is None else fenced[1]


def _replace_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
