"""The backup of a SQLite store that docs/guides/deployment.md describes."""

import sqlite3
from contextlib import closing
from pathlib import Path

from antiphon.store.sqlite.store import SqliteStore
from support.live_server import LiveServer, make_settings


def test_backup_of_a_running_server_is_a_complete_store(tmp_path: Path) -> None:
    running = LiveServer({}, make_settings(), SqliteStore(tmp_path / "antiphon.db"))
    first = running.ask("POST", "/v1/responses", {"model": "scripted", "input": "one"}).json
    # The command `.backup` of sqlite3 uses the same function.
    with (
        closing(sqlite3.connect(tmp_path / "antiphon.db")) as source,
        closing(sqlite3.connect(tmp_path / "copy.db")) as copy,
    ):
        source.backup(copy)
    later = running.ask("POST", "/v1/responses", {"model": "scripted", "input": "two"}).json
    running.stop()
    restored = LiveServer({}, make_settings(), SqliteStore(tmp_path / "copy.db"))
    try:
        assert restored.ask("GET", f"/v1/responses/{first['id']}").json == first
        assert restored.ask("GET", f"/v1/responses/{later['id']}").status == 404
        continued = {"model": "scripted", "input": "more", "previous_response_id": first["id"]}
        assert restored.ask("POST", "/v1/responses", continued).status == 200
    finally:
        restored.stop()
