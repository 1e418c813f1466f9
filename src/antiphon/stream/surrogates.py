"""Characters that a server has cut in two: half of one in a message, the other half in the next.

A server that counts in UTF-16 does so when it streams an emoji, and a half is no text that JSON could hold.
"""

import re

_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# A backslash that is escaped comes first: what follows it is no escape.
_ESCAPE = re.compile(
    rb"\\\\|" + _HIGH + _LOW + rb"|(?P<end>" + _HIGH + rb')(?=")|(?P<half>' + _HIGH + rb"|" + _LOW + rb")"
)
_UNKNOWN = rb"\ufffd"


class SurrogateMender:
    """Puts the halves together: the first waits for the message that begins with the second."""

    def __init__(self) -> None:
        self._waiting = b""

    def mend(self, data: bytes) -> bytes:
        """The JSON of a message, with whole characters alone."""
        if b"\\ud" not in data and b"\\uD" not in data:
            return data
        return _ESCAPE.sub(self._mend_escape, data)

    def _mend_escape(self, found: "re.Match[bytes]") -> bytes:
        if found["end"]:
            self._waiting = found["end"]
            return b""
        if not found["half"]:
            return found[0]
        first, self._waiting = self._waiting, b""
        if first and re.fullmatch(_LOW, found["half"]):
            return first + found["half"]
        return _UNKNOWN
