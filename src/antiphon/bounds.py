"""Bounds on dictionaries whose keys clients choose, such as projects, keys and names of models."""

from typing import Any


def remove_oldest(entries: dict[Any, Any], maximum: int) -> None:
    """Remove the entries that were added first, until at most `maximum` are left."""
    while len(entries) > maximum:
        del entries[next(iter(entries))]
