"""Escapes for U+0000 in texts, which neither PostgreSQL nor the JSON functions of SQLite support."""

from collections.abc import Iterable


def escape_text(text: str) -> str:
    """Replace U+0000. Different texts stay different."""
    if "\x00" in text or "\x01" in text:
        return text.replace("\x01", "\x011").replace("\x00", "\x010")
    return text


def unescape_text(text: str) -> str:
    return text.replace("\x010", "\x00").replace("\x011", "\x01") if "\x01" in text else text


def escape_all(texts: Iterable[str]) -> list[str]:
    """Escape the elements of a list, which the driver of a database does not escape."""
    return [escape_text(text) for text in texts]
