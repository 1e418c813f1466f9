"""The running servers of a folder: a locked file for each, with its process id and the result of its last reload.

The operating system releases the lock when the process ends, so a file that was left behind is recognized.
"""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

# The folder in a data folder.
FOLDER = "servers"
_LOCK_TRIES = 10
# A read may see a part of a write, which is not valid JSON.
_READ_TRIES = 100
_READ_PAUSE_SECONDS = 0.001


class ReloadResult(Struct, frozen=True):
    """The result of a reload: lines about the changes and the settings that need a restart, or an error."""

    changes: str = ""
    restart_needed: str = ""
    error: str = ""


class RunningServer(Struct, frozen=True, kw_only=True):
    """The content of a server's file.

    `reloads` is the number of reloads that have ended, and `result` the result of the last one. A process id is valid
    only on the same `machine`, which may be a container.
    """

    pid: int
    machine: str
    url: str
    reloads: int = 0
    result: ReloadResult = ReloadResult()

    @property
    def is_local(self) -> bool:
        """True if the process id is valid here."""
        return self.machine == identify_machine()

    @property
    def host(self) -> str:
        """The name of the machine or container."""
        return self.machine.rpartition("-")[0]


class ServerFile:
    """The file of this process. Without a writable folder there is none."""

    def __init__(self, descriptor: int | None, path: Path, server: RunningServer) -> None:
        self._descriptor = descriptor
        self._path = path
        self._server = server

    @classmethod
    def create(cls, folder: Path, url: str) -> Self:
        server = RunningServer(pid=os.getpid(), machine=identify_machine(), url=url)
        path = _locate_file(folder, server.pid)
        descriptor = None
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            list_servers(folder)  # deletes the files of dead servers
            descriptor = _create_locked(path)
        file = cls(descriptor, path, server)
        file._write()
        return file

    def report(self, result: ReloadResult) -> None:
        """Write the result of a reload, for the command that requested it."""
        self._server = msgspec.structs.replace(self._server, reloads=self._server.reloads + 1, result=result)
        self._write()

    def remove(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()  # if it is empty
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self) -> None:
        if self._descriptor is None:
            return
        with suppress(OSError):  # a full disk must not stop the server
            # One write, with spaces over the rest of the earlier content: a reader must not find an empty file.
            size = os.fstat(self._descriptor).st_size
            os.pwrite(self._descriptor, msgspec.json.encode(self._server).ljust(size), 0)


def list_servers(folder: Path) -> list[RunningServer]:
    """Return the running servers of a folder, on all machines, and delete the files of those that have ended."""
    found = [read_server(path) for path in sorted(folder.glob("*.json"))]
    return [server for server in found if server is not None]


def find_server(folder: Path, pid: int) -> RunningServer | None:
    """Return one server of a folder, or None if it has ended or is stopping."""
    return read_server(_locate_file(folder, pid))


def _locate_file(folder: Path, pid: int) -> Path:
    # Containers can share a folder and have equal process ids.
    return folder / f"{identify_machine()}-{pid}.json"


def _create_locked(path: Path) -> int | None:
    """Return the descriptor of a new, locked file. None if others lock it."""
    for _ in range(_LOCK_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # A process that lists the servers can lock and delete the file before it is locked here.
        if _is_unlocked(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
    return None


def read_server(path: Path) -> RunningServer | None:
    """Read the file of a server. The file of one that has ended is deleted."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _is_unlocked(descriptor):
            with suppress(OSError):
                path.unlink()
            return None
        for _ in range(_READ_TRIES):
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode(os.pread(descriptor, 1 << 20, 0), type=RunningServer)
            time.sleep(_READ_PAUSE_SECONDS)
        return None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _is_unlocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def identify_machine() -> str:
    """Return the name of the machine or container, together with its namespace of process ids."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"{socket.gethostname()}-{namespace}"
