"""Text output of `antiphon chat` and `antiphon run`: answers, reasoning and notes."""

import re
import sys
from typing import TextIO

_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_CLEAR_LINE = "\r\x1b[K"
# Control characters in an answer could move the cursor, change colours or change the window title.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class AnswerWriter:
    """Writes answers to `out`. Reasoning and notes are shown only on a terminal (`live`), dimmed."""

    def __init__(self, out: TextIO, *, live: bool) -> None:
        self._out = out
        self._live = live
        self._dim = False
        self._line_open = False
        self._has_status = False

    def write(self, text: str, *, dim: bool = False) -> None:
        if dim and not self._live:
            return
        self._clear_status()
        if dim != self._dim:
            self.end_line()
            self._out.write(_DIM if dim else "")
            self._dim = dim
        self._out.write(_CONTROL_CHARACTERS.sub("", text) if self._live else text)
        self._out.flush()
        self._line_open = not text.endswith("\n") if text else self._line_open

    def end_line(self) -> None:
        """End the current line, if it has any text."""
        self._clear_status()
        self._out.write(_RESET if self._dim else "")
        self._out.write("\n" if self._line_open else "")
        self._out.flush()
        self._dim = self._line_open = False

    def show_status(self, text: str) -> None:
        """Show a line until the next output replaces it, on a terminal only."""
        if self._live:
            self.end_line()
            self._out.write(f"{_DIM}{text}{_RESET}")
            self._out.flush()
            self._has_status = True

    def _clear_status(self) -> None:
        if self._has_status:
            self._out.write(_CLEAR_LINE)
            self._has_status = False

    def note(self, text: str) -> None:
        """Write a line that is not part of the answer, on a terminal only."""
        self.end_line()
        self.write(text, dim=True)
        self.end_line()

    def warn(self, text: str) -> None:
        """Write a note about the answer; without a terminal, to standard error."""
        if self._live:
            self.note(text)
        else:
            print(f"antiphon: {text}", file=sys.stderr)
