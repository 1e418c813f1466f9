"""Which response an item was made in: the ids that we give say so."""

TOKEN_LENGTH = 44


def find_owner(item_id: str) -> str | None:
    """The id of the response an item was made in, if the id is one of ours."""
    _, _, rest = item_id.partition("_")
    return f"resp_{rest[:TOKEN_LENGTH]}" if len(rest) > TOKEN_LENGTH else None
