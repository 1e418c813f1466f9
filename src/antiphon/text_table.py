"""Tables of text for a terminal, where a character takes two columns, one or none."""

import unicodedata
from collections.abc import Collection, Sequence

GAP = "  "


def format_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table. `right` are the columns that are aligned on the right."""
    widths = measure_columns(rows)
    return [
        GAP.join(
            " " * (width - measure_text(cell)) + cell if column in right else pad_text(cell, width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def measure_table(rows: Sequence[Sequence[str]]) -> int:
    """Return the number of terminal columns that a table takes."""
    widths = measure_columns(rows)
    return sum(widths) + len(GAP) * (len(widths) - 1)


def measure_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(measure_text, column)) for column in zip(*rows, strict=True)]


def measure_text(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    return len(text) if text.isascii() else sum(map(_measure_character, text))


def _measure_character(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def pad_text(text: str, width: int) -> str:
    """Return a text with spaces after it, so that it takes at least `width` terminal columns."""
    return text + " " * (width - measure_text(text))


def cut_text(text: str, width: int) -> str:
    """Return the start of a text that takes at most `width` terminal columns."""
    used = 0
    for end, character in enumerate(text):
        used += _measure_character(character)
        if used > width:
            return text[:end]
    return text


def shorten_text(text: str, width: int) -> str:
    """Return a text that takes at most `width` terminal columns, with an ellipsis if it is cut."""
    return text if measure_text(text) <= width else f"{cut_text(text, width - 1)}…"


def replace_controls(text: str) -> str:
    """Return a text without characters that could control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
