"""The free text of a custom tool's call, read out of a function's arguments while they are still being written."""

import json
import re
from typing import Any

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BLANK = re.compile(r"\s+")
_PIECE = re.compile(
    r'[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt]'
    r"|\\"
)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
_FENCE = re.compile(r"\s*```[^\n`]*\n(.*?)\n?```\s*", re.DOTALL)


class FreeformReader:
    """Reads `{"input": "…"}` piece by piece.

    A model that writes the bare text is understood at once. One that writes other JSON is understood at the end, since
    only then it shows what that is.
    """

    def __init__(self) -> None:
        self._waiting = ""
        self._later: list[str] = []
        self._read = self._read_opening

    def feed(self, fragment: str) -> str:
        """The text that has become clear with this fragment."""
        self._waiting += fragment
        return self._read()

    def close(self) -> str:
        """The rest of the text, now that nothing more is to come."""
        if self._read == self._read_string:
            return self._decode(hold=0)
        return "" if self._read == self._read_nothing else unwrap("".join([*self._later, self._waiting]))

    def _read_opening(self) -> str:
        opening = _OPENING.match(self._waiting)
        if opening is not None:
            self._waiting = self._waiting[opening.end() :]
            self._read = self._read_string
        elif '{"input":"'.startswith(_BLANK.sub("", self._waiting)):
            return ""
        else:
            is_json = self._waiting.lstrip()[0] in '{"'
            self._read = self._read_later if is_json else self._read_bare
        return self._read()

    def _read_bare(self) -> str:
        text, self._waiting = self._waiting, ""
        return text

    def _read_later(self) -> str:
        self._later.append(self._waiting)
        self._waiting = ""
        return ""

    def _read_nothing(self) -> str:
        self._waiting = ""
        return ""

    def _read_string(self) -> str:
        return self._decode(hold=_LONGEST_ESCAPE)

    def _decode(self, *, hold: int) -> str:
        """Decode up to the closing quote. An escape waits until it is surely whole: `hold` characters must follow."""
        text, start, decoded = self._waiting, 0, []
        while start < len(text) and (text[start] != "\\" or len(text) - start >= hold):
            piece = _PIECE.match(text, start)
            if piece is None:  # the closing quote: what follows it is not ours
                self._read = self._read_nothing
                start = len(text)
                break
            decoded.append(_decode_piece(piece[0]))
            start = piece.end()
        self._waiting = text[start:]
        return "".join(decoded)


def _decode_piece(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    if piece[1:2] == "u":
        code = int(piece[2:6], 16)
        if len(piece) > len(r"\ud83d"):
            return chr(0x10000 + ((code - 0xD800) << 10) + (int(piece[8:], 16) - 0xDC00))
        return "\N{REPLACEMENT CHARACTER}" if 0xD800 <= code < 0xE000 else chr(code)
    # A backslash that escapes nothing is one that the model forgot to double.
    return _ESCAPES.get(piece[1:], piece[1:] or piece)


def unwrap(text: str) -> str:
    """The bare text that a model has wrapped in JSON: as `input`, under another name, or as a string."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if found == {}:  # a model that has nothing to say calls with no arguments, for which backends put this
        return ""
    if isinstance(found, dict):
        texts = [value for value in found.values() if isinstance(value, str)]
        named = found.get("input")
        found = named if isinstance(named, str) else texts[0] if len(texts) == len(found) == 1 else None
    return _replace_surrogates(found) if isinstance(found, str) else text


def strip_fence(text: str) -> str:
    """The text inside of a code fence, if there is one around all of it."""
    fenced = _FENCE.fullmatch(text)
    return text if fenced is None else fenced[1]


def _replace_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
