"""The size of a regular expression with its repetitions written out, found without compiling it."""

import re

# Repetition counts with more digits than this count as infinite.
_MAX_DIGITS = 9
_REPETITION = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
# The argument of an escape in braces is not a repetition.
_ESCAPE = re.compile(r"\\(?:[pPxuUbB]\{[^}\\{]*\}|.)", re.DOTALL)
_GROUP_START = re.compile(r"\((?:\?(?:P?<[A-Za-z_]\w*>|[a-zA-Z-]*:|[=!]|<[=!])?)?")


class PatternFault(Exception):
    """A pattern is not a regular expression. The text of the error says why."""


def exceeds_size(pattern: str, limit: int) -> bool:
    """Return True if the pattern has more than `limit` characters when every repetition is written out.

    A character class counts as one character. Raises PatternFault if brackets do not match.
    """
    return len(pattern) > limit or _Scanner(pattern, limit).exceeds_limit()


class _Scanner:
    """Reads a pattern once. `_sizes` has the size of each open group, and `_last` the size of the last element."""

    def __init__(self, pattern: str, limit: int) -> None:
        self._pattern = pattern
        self._limit = limit
        self._sizes = [0]
        self._last = 0

    def exceeds_limit(self) -> bool:
        position = 0
        while position < len(self._pattern):
            position = self._read(position)
            if self._sizes[-1] > self._limit:
                return True
        if len(self._sizes) > 1:
            raise PatternFault("a group is not closed")
        return False

    def _read(self, position: int) -> int:
        """Read one element and return the position after it."""
        character = self._pattern[position]
        if character == "(":
            self._sizes.append(0)
            start = _GROUP_START.match(self._pattern, position)
            return start.end() if start else position + 1
        if character == ")":
            self._close_group()
            return position + 1
        if character == "{" and (found := _REPETITION.match(self._pattern, position)):
            self._repeat(found)
            return found.end()
        if character in "*+?|^$":
            return position + 1
        end = position + 1
        if character == "\\":
            escape = _ESCAPE.match(self._pattern, position)
            if escape is None:
                raise PatternFault("it ends in a backslash")
            end = escape.end()
        elif character == "[":
            end = self._find_class_end(position)
        self._add(1)
        return end

    def _add(self, size: int) -> None:
        self._sizes[-1] += size
        self._last = size

    def _close_group(self) -> None:
        if len(self._sizes) == 1:
            raise PatternFault("a closing parenthesis has no opening one")
        self._add(max(1, self._sizes.pop()))

    def _repeat(self, found: "re.Match[str]") -> None:
        least, has_comma, most = found.groups()
        if max(len(least), len(most or "")) > _MAX_DIGITS:
            count = 10**_MAX_DIGITS
        elif most and int(most) < int(least):
            raise PatternFault(f"the repetition {found[0]} ends before it starts")
        else:
            count = int(most or least) + (bool(has_comma) and not most)
        size = self._last * max(1, count)
        self._sizes[-1] += size - self._last
        self._last = size

    def _find_class_end(self, position: int) -> int:
        """Return the position after a character class. Classes can be nested."""
        depth = 0
        while position < len(self._pattern):
            character = self._pattern[position]
            if character == "\\":
                position += 1
            elif character == "[":
                depth += 1
                if self._pattern.startswith("^", position + 1):
                    position += 1
                if self._pattern.startswith("]", position + 1):  # a bracket in the first position is literal
                    position += 1
            elif character == "]":
                depth -= 1
                if depth == 0:
                    return position + 1
            position += 1
        raise PatternFault("a character class is not closed")
