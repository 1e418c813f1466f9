"""Detection of owners of runs whose process has died.

Each owner of runs holds a lock on a file of its own, in a folder beside the database. The operating system releases the
lock when the process ends, even after a crash. So processes on the same machine can claim the runs of a dead owner
before its lease expires. If the file system has no such locks, only the expiry of the lease counts.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def locate_owners(path: Path) -> Path:
    """Return the folder with the lock files of a database."""
    return path.with_name(f"{path.name}-owners")


class LiveProcesses:
    """The lock files of the owners that share a database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def register(self, owner: str) -> None:
        """Hold the lock of this owner until the process ends or the owner is unregistered."""
        if owner in self._files:
            return
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for other in self._folder.iterdir():  # deletes the files of dead owners that have no runs
                self.is_dead(other.name)
            self._files[owner] = os.open(self._folder / owner, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._files[owner], fcntl.LOCK_EX)

    def unregister(self, owner: str) -> None:
        file = self._files.pop(owner, None)
        if file is not None:
            self._remove(owner)
            os.close(file)

    def unregister_all(self) -> None:
        for owner in tuple(self._files):
            self.unregister(owner)

    def has_live(self) -> bool:
        """Return True if any owner's process is alive."""
        try:
            owners = [file.name for file in self._folder.iterdir()]
        except OSError:
            return False
        return any(not self.is_dead(owner) for owner in owners)

    def is_dead(self, owner: str) -> bool:
        """Return True if this owner's process has died. Its file is deleted, so a second call returns False."""
        if not owner.isalnum():  # a damaged name must not lead to another file
            return False
        try:
            file = os.open(self._folder / owner, os.O_RDWR)
        except OSError:  # the owner was unregistered or never registered, so its state is unknown
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            self._remove(owner)
            return True
        finally:
            os.close(file)

    def _remove(self, owner: str) -> None:
        with suppress(OSError):
            (self._folder / owner).unlink()
