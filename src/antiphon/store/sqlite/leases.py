"""Whose a background run is: what every write of one asks first, in its own transaction."""

import sqlite3

HELD = "SELECT 1 FROM runs WHERE project = ? AND response_id = ? AND owner = ?"


def is_held(connection: sqlite3.Connection, project: str, response_id: str, owner: str) -> bool:
    """Whether the run is this owner's. A lease that ran out counts until another owner takes the run."""
    return connection.execute(HELD, (project, response_id, owner)).fetchone() is not None
