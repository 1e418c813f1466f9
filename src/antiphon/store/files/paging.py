"""Pages of a list, by the position of its rows."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from antiphon.errors import InvalidRequest
from antiphon.store.base import Order


def list_page(
    connection: sqlite3.Connection,
    select: str,
    parameters: Sequence[object],
    find_position: str,
    keys: Sequence[object],
    after: str | None,
    before: str | None,
    limit: int,
    order: Order,
) -> tuple[list[Sequence[Any]], bool]:
    """Return the rows of a page without their positions, and True if there are more.

    The first column of `select` is the position, and it ends in a condition. `find_position` returns the position of a
    row by its id. Its parameters are the first of `keys`, the id, and the rest of `keys`. With `before` and without
    `after`, the page ends right before that row.
    """
    conditions, bounds = "", list[int]()
    for name, cursor in (("after", after), ("before", before)):
        if cursor is not None:
            is_greater = (name == "after") == (order == "asc")
            conditions += f" AND position {'>' if is_greater else '<'} ?"
            bounds.append(_find(connection, find_position, keys, cursor, name))
    backwards = before is not None and after is None
    direction = "ASC" if (order == "asc") != backwards else "DESC"
    statement = f"{select}{conditions} ORDER BY position {direction} LIMIT ?"
    rows = connection.execute(statement, (*parameters, *bounds, limit + 1)).fetchall()
    page = [row[1:] for row in rows[:limit]]
    return page[::-1] if backwards else page, len(rows) > limit


def _find(connection: sqlite3.Connection, statement: str, keys: Sequence[object], cursor: str, name: str) -> int:
    row = connection.execute(statement, (keys[0], cursor, *keys[1:])).fetchone()
    if row is None:
        raise InvalidRequest(f"There is no '{cursor}' in the list.", param=name, code="invalid_value")
    position: int = row[0]
    return position
