"""Servers that were started separately on one SQLite file."""

import logging
import os
from pathlib import Path

import pytest

from antiphon.config.settings import Settings
from antiphon.server.running_servers import list_servers
from antiphon.server.store_users import register_store_user
from support.crashing_server import KillableServer
from support.live_server import make_settings

SCRIPT = {"default": "Hello"}
URL = "http://127.0.0.1:1"


def test_second_server_on_a_sqlite_file_warns_at_its_start(tmp_path: Path) -> None:
    first = KillableServer(tmp_path, SCRIPT)
    second = KillableServer(tmp_path, SCRIPT, workers=2, log_format="text")
    folder = tmp_path / "store.db-servers"
    assert {server.pid for server in list_servers(folder)} == {first.pid, second.pid}
    first.kill()
    assert [server.pid for server in list_servers(folder)] == [second.pid]
    log = second.stop()
    others = f"http://{first.address} (process {first.pid} on {os.uname().nodename})"
    assert log.count(f"another server uses the SQLite file {tmp_path}/store.db: {others}. Each server answers 404") == 1
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "is_registered"),
    [({}, True), ({"stateless": True}, False), ({"store": "memory:"}, False), ({"store": "postgresql://h/n"}, False)],
)
def test_only_a_sqlite_file_in_use_is_registered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object], is_registered: bool
) -> None:
    settings: Settings = make_settings(**{"store": f"sqlite:///{tmp_path}/store.db"} | changes)
    with caplog.at_level(logging.WARNING):
        file = register_store_user(settings, URL)
    folder = tmp_path / "store.db-servers"
    assert ([server.url for server in list_servers(folder)], caplog.messages) == ([URL] if is_registered else [], [])
    if file is not None:
        file.remove()
