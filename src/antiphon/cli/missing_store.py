"""The check for a store that does not exist yet, for commands that only read."""

import sys

from antiphon.store.location import find_missing_file


def is_missing(url: str) -> bool:
    """Return True if the file of a store does not exist, with a warning for the user."""
    path = find_missing_file(url)
    if path is not None:
        print(f"antiphon: warning: there is no store at {path}", file=sys.stderr)
    return path is not None
