"""Extraction of the code from the arguments of a call while the model writes them."""

import json
import re

_BEGINNING = re.compile(r'\s*\{\s*"code"\s*:\s*"')
_BEGINNING_MAX = 256
_SURROGATE_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_TEXT = re.compile(rf'(?:[^"\\]+|\\["\\/bfnrt]|{_SURROGATE_PAIR}|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}})+')
# A high surrogate and a following character that cannot begin a low one.
_LONE_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])")


class CodeReader:
    """Reads the arguments in pieces and returns the code as far as it has arrived.

    The code must be the first member of the object. If it is not, the reader returns nothing, and the caller takes the
    code from the complete arguments.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._is_inside = False
        self._is_done = False

    def feed(self, piece: str) -> str:
        """Return the part of the code that this piece completes."""
        if self._is_done:
            return ""
        self._pending += piece
        if not self._is_inside:
            beginning = _BEGINNING.match(self._pending)
            if beginning is None:
                self._is_done = len(self._pending) > _BEGINNING_MAX
                return ""
            self._pending = self._pending[beginning.end() :]
            self._is_inside = True
        return self._read_text()

    def _read_text(self) -> str:
        parts: list[str] = []
        while self._pending:
            if found := _TEXT.match(self._pending):
                parts.append(json.loads(f'"{found[0]}"', strict=False))
            elif found := _LONE_SURROGATE.match(self._pending):
                parts.append("\ufffd")
            else:
                # The closing quote, or an escape sequence that is not complete.
                self._is_done = self._pending[0] == '"'
                break
            self._pending = self._pending[found.end() :]
        return clean_text("".join(parts))


def clean_text(text: str) -> str:
    """Replace lone surrogates, because they cannot be encoded."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_code(arguments: str) -> str | None:
    """Return the code of complete arguments, or None if they have none."""
    try:
        decoded = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return None
    code = decoded.get("code") if isinstance(decoded, dict) else None
    return clean_text(code) if isinstance(code, str) else None
