"""Pages of a list, by the position of its rows."""

from collections.abc import Sequence
from typing import Any

from antiphon.errors import InvalidRequest
from antiphon.store.base import Order
from antiphon.store.sql_steps import SqlStep, Steps


def list_page(
    select: str,
    parameters: Sequence[object],
    find_position: str,
    keys: Sequence[object],
    after: str | None,
    before: str | None,
    limit: int,
    order: Order,
) -> Steps[tuple[list[Sequence[Any]], bool]]:
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
            found = yield SqlStep(find_position, (keys[0], cursor, *keys[1:]))
            if not found:
                raise InvalidRequest(f"There is no '{cursor}' in the list.", param=name, code="invalid_value")
            bounds.append(found[0][0])
    backwards = before is not None and after is None
    direction = "ASC" if (order == "asc") != backwards else "DESC"
    statement = f"{select}{conditions} ORDER BY position {direction} LIMIT ?"
    rows = yield SqlStep(statement, (*parameters, *bounds, limit + 1))
    page = [row[1:] for row in rows[:limit]]
    return page[::-1] if backwards else page, len(rows) > limit
