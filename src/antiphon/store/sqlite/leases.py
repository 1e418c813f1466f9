"""Who is alive of the processes that share a database: a lock ends with its process, however that ends.

Each owner of runs holds one, on a file of its own beside the database. So whoever shares the machine need not wait for
the lease of a dead one to run out. Where there are no such locks, the lease alone counts.
"""

import fcntl
import os
import sqlite3
from contextlib import suppress
from pathlib import Path


class Owners:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def enter(self, owner: str) -> None:
        """Hold the lock of this owner, for as long as this process lives or until it leaves."""
        if owner in self._held:
            return
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for other in self._folder.iterdir():  # those that died without any runs leave only this
                self.is_dead(other.name)
            self._held[owner] = os.open(self._folder / owner, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._held[owner], fcntl.LOCK_EX)

    def leave(self, owner: str) -> None:
        held = self._held.pop(owner, None)
        if held is not None:
            self._remove(owner)
            os.close(held)

    def leave_all(self) -> None:
        for owner in tuple(self._held):
            self.leave(owner)

    def is_dead(self, owner: str) -> bool:
        """Whether this owner is known to have died. Its file goes then: nobody will ask again."""
        try:
            found = os.open(self._folder / owner, os.O_RDWR)
        except OSError:  # it has left, or never came in: nothing is known of it
            return False
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            self._remove(owner)
            return True
        finally:
            os.close(found)

    def _remove(self, owner: str) -> None:
        with suppress(OSError):
            (self._folder / owner).unlink()


HELD = "SELECT 1 FROM runs WHERE project = ? AND response_id = ? AND owner = ?"


def is_held(connection: sqlite3.Connection, project: str, response_id: str, owner: str) -> bool:
    """Whether the run is this owner's. A lease that ran out counts until another owner takes the run."""
    return connection.execute(HELD, (project, response_id, owner)).fetchone() is not None
