"""Tools of a server under test. The server loads them by file name."""

from antiphon import tool

CALLED: list[str] = []


@tool
def look_up(word: str) -> dict[str, str]:
    """Look up what a word means."""
    CALLED.append(word)
    return {"word": word, "meaning": "a call and its answer"}


@tool
def read_mood() -> str:
    """Read the mood of the room."""
    return "mild"


@tool
def explode() -> str:
    """Explode."""
    raise ValueError("no fuse")
