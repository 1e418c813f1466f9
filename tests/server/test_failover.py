"""A streaming replica of PostgreSQL: it is refused as a store, and nodes use it after it was promoted."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.cli.main import main
from support.crashing_server import KillableServer, wait_until
from support.postgres_server import PostgresServer, is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="needs make extras"),
]

REQUEST = {"model": "scripted", "input": "Hello"}


@pytest.fixture
def servers() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary and its replica, which is synchronous: no acknowledged write is lost."""
    with contextlib.ExitStack() as stack:
        primary = PostgresServer()
        stack.callback(primary.remove)
        replica = PostgresServer(copy_of=primary)
        stack.callback(replica.remove)
        primary.configure(synchronous_standby_names="*")
        yield primary, replica


def test_node_continues_on_a_promoted_replica(
    servers: tuple[PostgresServer, PostgresServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    primary, replica = servers
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{replica.port}"
    url = f"postgresql://postgres:secret@{hosts}/postgres?target_session_attrs=primary"
    node = KillableServer(tmp_path, {"default": "You said: {input}"}, store=url)
    try:
        created = [node.ask("POST", "/v1/responses", REQUEST) for _ in range(20)]
        queued = node.start_background("Later")
        for command in (["db", "migrate"], ["db", "expire"], ["keys", "list"], ["usage"]):
            assert main([*command, "--store", replica.url]) == 1
            assert capsys.readouterr().err == (
                f"antiphon: The store 127.0.0.1:{replica.port}/postgres cannot be opened: the server is a read-only "
                "replica. Use the URL of the primary.\n"
            )
        primary.stop(is_crash=True)
        assert node.ask("POST", "/v1/responses", REQUEST)["error"]["code"] == "store_unavailable"
        replica.promote()
        wait_until(lambda: node.ask("GET", "/readyz").get("status") == "ready")
        assert [node.ask("GET", f"/v1/responses/{each['id']}") for each in created] == created
        wait_until(lambda: node.status(queued) == "completed")
        assert node.ask("POST", "/v1/responses", REQUEST)["status"] == "completed"
    finally:
        log = node.stop()
    assert "secret" not in log
