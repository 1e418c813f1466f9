"""Connections to a PostgreSQL server, and the errors that clients get when it fails.

Error messages contain the host and the name of the database, never the URL: it may contain a password.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from antiphon.errors import AntiphonError, ConfigError, ServerError, StoreFull, StoreUnavailable
from antiphon.store.escaped_text import escape_text, unescape_text
from antiphon.store.postgres.driver import asyncpg
from antiphon.store.sql_steps import WriteConflict

if TYPE_CHECKING:
    from asyncpg import Connection

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
# Maximum time of a statement. A server that does not answer within this time counts as failed.
STATEMENT_SECONDS = 30.0

# Maximum time between two statements of a transaction. PostgreSQL then ends it and releases its locks: the process may
# be frozen, or its network lost.
IDLE_SECONDS = 10
# All operations are written for this isolation. The default of a server, a database or a user may be another one. The
# limit is set in the transaction, because a pooler gives each transaction another session. Both are one round trip.
BEGIN = f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'"

FULL = "The store is full: there is no space left on the disk of its database."
LOST = "The database of the store cannot be reached."
READ_ONLY = "The database of the store is read-only."
FAILED = "The database of the store failed. See the server's log."

# The connection cannot be used any more, or the server does not accept one now.
CONNECTION_ERRORS = (
    OSError,  # also TimeoutError and ConnectionError
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server ended the session while nothing was awaited
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
)
# The database cannot be opened, or its URL is invalid.
OPENING_ERRORS = (
    OSError,
    OverflowError,  # a port, in an option of the URL or a variable
    ValueError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # no server has the `target_session_attrs` of the URL
)
# The database cannot be used in its present state. An administrator has changed it, or has to.
UNUSABLE_ERRORS = (
    asyncpg.PostgresSystemError,
    asyncpg.InternalServerError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ObjectNotInPrerequisiteStateError,  # it accepts no connections, or a lock was not free in `lock_timeout`
    asyncpg.UndefinedTableError,  # another database has its name now, or is being restored
    asyncpg.UndefinedColumnError,
)
# Two transactions waited for each other. Each can be repeated.
CONFLICTS = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)


# A host of a URL, with or without a port. It may be empty.
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::(\d*))?")
_MAX_PORT = 65535
# Options of a URL with the name of a file.
_TLS_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")


class ServerAddress:
    """The URL of a database. `str` returns only its hosts and name.

    Raises ConfigError for a URL of which a part of the password could be taken for a host or a name.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigError("The URL of the PostgreSQL store is invalid.") from None
        if parts.scheme not in ("postgresql", "postgres") or not url.startswith(f"{parts.scheme}://"):
            raise ConfigError("The URL of the PostgreSQL store must begin with postgresql://.")
        if parts.fragment:
            raise ConfigError("The URL of the PostgreSQL store must not contain '#'. Write %23 for it.")
        _, has_user, hosts = parts.netloc.rpartition("@")
        is_split = parts.netloc.count("@") > 1 or "@" in parts.path or ("@" in parts.query and not parts.path)
        found = [_HOST.fullmatch(host) for host in hosts.split(",")]
        if is_split or (not has_user and not all(found)):
            raise ConfigError(
                "The URL of the PostgreSQL store is invalid: a port is a number, and in the user name and the "
                "password, write %2F for '/', %3F for '?' and %40 for '@'."
            )
        if not all(match and 0 < int(match[1] or 1) <= _MAX_PORT for match in found):
            raise ConfigError(
                f"The URL of the PostgreSQL store is invalid: {hosts} has a wrong port. A port is a number from 1 to "
                f"{_MAX_PORT}."
            )
        self._text = f"{hosts or 'localhost'}{parts.path}"

    def __str__(self) -> str:
        return self._text


class PostgresConnector:
    """Opens connections to one server. `is_pooled`: a pooler such as PgBouncer is between this process and the server.

    A pooler in transaction mode gives every transaction another session. So no state of a session is used, and
    statements are not prepared. Raises ConfigError if a file that the URL names cannot be read.
    """

    def __init__(self, address: ServerAddress) -> None:
        _check_files(address)
        self.address = address
        self.is_pooled: bool | None = None

    async def connect(self) -> "Connection[Any]":
        """Open a connection. The first one finds out whether there is a pooler."""
        connection = await self._open()
        try:
            if self.is_pooled is None:
                self.is_pooled = await _is_pooled(connection)
                if self.is_pooled:
                    await close(connection)
                    connection = await self._open()
            if not self.is_pooled:  # through a pooler, each transaction names it
                await connection.execute("SET default_transaction_isolation = 'read committed'")
            async with run_transaction(connection):
                await connection.set_type_codec(
                    "text", schema="pg_catalog", encoder=escape_text, decoder=unescape_text, format="text"
                )
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _open(self) -> "Connection[Any]":
        options: dict[str, Any] = {"statement_cache_size": 0} if self.is_pooled else {}
        return await asyncpg.connect(
            self.address.url, timeout=CONNECT_SECONDS, command_timeout=STATEMENT_SECONDS, **options
        )


def make_listener(url: str) -> PostgresConnector | None:
    """Return the connector for `store_listen_url`, if it is set."""
    try:
        return PostgresConnector(ServerAddress(url)) if url else None
    except ConfigError as error:
        raise ConfigError(f"store_listen_url: {error.message}") from None


def _check_files(address: ServerAddress) -> None:
    """Raise ConfigError for an unreadable file. asyncpg does not name it, or ignores it, depending on `sslmode`."""
    options = dict(parse_qsl(urlsplit(address.url).query))
    for name in _TLS_FILES:
        try:
            if name in options:
                Path(options[name]).open("rb").close()
        except OSError as error:
            reason = f"{name} names the file {options[name]}, which cannot be read: {error.strerror}"
            raise ConfigError(f"The store {address} cannot be opened: {reason}.") from None


async def _is_pooled(connection: "Connection[Any]") -> bool:
    """Return True if there is a pooler: it gives its clients another process number than that of the session."""
    # A statement without parameters is one message. Others need two, which may come to different sessions.
    check = f"DO $$ BEGIN ASSERT pg_backend_pid() = {connection.get_server_pid()}; END $$"
    try:
        await connection.execute(check)
    except asyncpg.AssertError:
        return True
    return False


@asynccontextmanager
async def run_transaction(connection: "Connection[Any]") -> AsyncIterator[None]:
    """Run the body in a transaction."""
    try:
        await connection.execute(BEGIN)
        yield
        await connection.execute("COMMIT")
    except CONNECTION_ERRORS:
        connection.terminate()
        raise
    except BaseException:
        await roll_back(connection)
        raise


async def roll_back(connection: "Connection[Any]") -> None:
    """End a transaction that has failed. If that fails too, end the connection."""
    try:
        await connection.execute("ROLLBACK")
    except (*CONNECTION_ERRORS, asyncpg.PostgresError):
        connection.terminate()
    except BaseException:  # cancelled again, maybe before the statement was sent
        connection.terminate()
        raise


def is_uncommitted(error: BaseException) -> bool:
    """Return True if the server cannot have received the COMMIT that failed with this error.

    It has ended the transaction because it was idle, or the end of the session arrived together with the last result.
    """
    if isinstance(error, asyncpg.InternalClientError):
        return "cannot switch to state" in str(error)  # asyncpg checks its state before it sends a statement
    return any(isinstance(each, asyncpg.IdleInTransactionSessionTimeoutError) for each in (error, error.__cause__))


async def close(connection: "Connection[Any]") -> None:
    """Close a connection, including one that does not answer any more."""
    try:
        await connection.close(timeout=1)
    except (*CONNECTION_ERRORS, asyncpg.PostgresError):
        connection.terminate()


class DatabaseHealth:
    """The condition of a database. `failure` is the error of the last write, or None if it succeeded."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._lost_at: float | None = None
        self._found_at: float | None = None
        self.failure: StoreUnavailable | None = None

    def measure_outage(self, lease: float) -> float:
        """Return the seconds since the last contact before an outage, or 0 if there was no recent outage.

        During an outage no owner can renew its leases. After it, every owner gets the time of one lease to renew them.
        """
        now = time.monotonic()
        if self._lost_at is None or (self._found_at is not None and now - self._found_at > lease):
            return 0.0
        return now - self._lost_at

    def report_contact(self, *, is_lost: bool) -> None:
        """Record that the server was reached, or that it was not."""
        if is_lost:
            if self._lost_at is None or self._found_at is not None:
                self._lost_at, self._found_at = time.monotonic(), None
        elif self._lost_at is not None and self._found_at is None:
            self._found_at = time.monotonic()

    def report_success(self) -> None:
        self.report_contact(is_lost=False)
        if self.failure is not None:
            self.failure = None
            logger.warning("the store %s works again", self._address)

    def report_error(self, error: BaseException) -> AntiphonError:
        """Return the error that a client gets. Log a failure of the database once."""
        described = describe_error(error)
        if isinstance(described, StoreUnavailable):
            self.report_contact(is_lost=True)
            if type(self.failure) is not type(described):
                logger.error("the store %s cannot be used: %s", self._address, summarize_error(error))
            self.failure = described
        return described


def describe_error(error: BaseException) -> AntiphonError:
    """Return the error that a client gets for an error of PostgreSQL. Its text has no names of tables or hosts."""
    if isinstance(error, AntiphonError):
        return error
    if isinstance(error, asyncpg.DiskFullError):
        return StoreFull(FULL)
    if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
        return StoreUnavailable(READ_ONLY)
    if isinstance(error, CONNECTION_ERRORS):
        return StoreUnavailable(LOST)
    if isinstance(error, UNUSABLE_ERRORS):
        return StoreUnavailable(FAILED)
    failure = (WriteConflict if isinstance(error, CONFLICTS) else ServerError)("The store failed.")
    failure.__cause__ = error  # for the log
    return failure


def explain_refusal(address: ServerAddress, error: BaseException) -> ConfigError:
    """Return the error for a database that cannot be opened at the start."""
    reason = summarize_error(error)
    if str(error).startswith("root certificate file"):
        reason = f"{reason}. Name it with sslrootcert in the URL"
    elif isinstance(error, OverflowError):
        reason = f"a port is a number from 1 to {_MAX_PORT}"
    elif isinstance(error, (asyncpg.ClientConfigurationError, ValueError)):
        reason = "the URL is invalid"  # the text of the error may contain parts of it
    elif isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        reason = (
            f"no connection within {CONNECT_SECONDS:g} seconds, or no result of a statement within "
            f"{STATEMENT_SECONDS:g}. Check that the server answers, and that no other session locks the tables"
        )
    elif isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        reason = "no server in the URL is as its target_session_attrs requires"
    elif isinstance(error, asyncpg.InsufficientPrivilegeError):
        reason = (
            f"{reason}. The first start creates tables: its user needs CREATE on the schema, and all rights on them"
        )
    return ConfigError(f"The store {address} cannot be opened: {reason}.")


def summarize_error(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused"
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
