"""The number of JSON values in a body, as a limit on the work and memory that decoding it takes.

A body of 64 MB with `[1,1,1,…` has 32 million values. Decoded, they take gigabytes.
"""

import re

# A string with its quotes, or a character that begins a value or separates two.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{,]', re.DOTALL)
_SEPARATORS = (b",", b"[", b"{")
# The interpreter lock is held while a part of the body is searched.
_STEP_BYTES = 2**20


def has_more_values(body: bytes, limit: int) -> bool:
    """Return True if the body has more JSON values than the limit.

    Commas and opening brackets outside of strings are counted. So a member of an array or an object counts once, and
    twice if it is an array or an object itself. Strings are skipped only if there are too many such characters.
    """
    if len(body) <= limit or not _has_more_separators(body, limit):
        return False
    values = strings = 0
    for token in _TOKEN.finditer(body):
        if body[token.start()] == 0x22:
            strings += 1
        else:
            values += 1
        # Strings without separators between them are no JSON.
        if values > limit or strings > 2 * limit + 2:
            return True
    return False


def _has_more_separators(body: bytes, limit: int) -> bool:
    """Return True if the body has more characters that may separate values than the limit."""
    found = 0
    for start in range(0, len(body), _STEP_BYTES):
        found += sum(body.count(each, start, start + _STEP_BYTES) for each in _SEPARATORS)
        if found > limit:
            return True
    return False
