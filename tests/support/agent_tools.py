"""The tools of a server in the tests: loaded by their module's name, as anybody's are."""

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
