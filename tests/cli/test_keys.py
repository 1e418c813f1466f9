"""`antiphon keys`: create, list, revoke and rotate."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli.main import main
from antiphon.store.location import locate_store
from antiphon.store.sqlite.database import connect
from antiphon.store.usage import StoredProject

Run = Callable[..., str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def keys(path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command and return its output."""

    def run(*arguments: str, status: int = 0) -> str:
        assert main(["keys", *arguments, "--store", f"sqlite:///{path}"]) == status
        output = capsys.readouterr()
        return output.err if status else output.out

    return run


def load(text: str) -> Any:
    return json.loads(text)


def test_created_key_is_printed_once_and_stored_only_as_a_digest(keys: Run, path: Path) -> None:
    created = load(keys("create", "--project", "p", "--name", "laptop", "--expires", "30d", "--json"))
    assert list(created) == ["id", "key", "project", "name", "scopes", "created_at", "expires_at"]
    assert (created["project"], created["name"], created["scopes"]) == ("p", "laptop", ["inference"])
    assert created["expires_at"] - created["created_at"] == 30 * 86400
    assert re.fullmatch(r"sk-antiphon-[\w-]{43}", created["key"])
    (listed,) = load(keys("list", "--json"))
    assert listed == {
        "id": created["id"],
        "project": "p",
        "name": "laptop",
        "scopes": ["inference"],
        "created_at": created["created_at"],
        "expires_at": created["expires_at"],
        "revoked_at": None,
        "last_used_at": None,
        "status": "active",
    }
    secret = created["key"].removeprefix("sk-antiphon-").encode()
    connection = connect(path)
    assert secret not in "\n".join(connection.iterdump()).encode()
    connection.close()


def test_keys_are_shown_as_a_table(keys: Run) -> None:
    assert "There are no keys" in keys("list")
    created = keys("create", "--project", "team a", "--scope", "read", "--scope", "admin")
    assert "project  team a\nscopes   admin, read\nexpires  never\nkey      sk-antiphon-" in created
    key_id = created.split()[1]
    header, row = keys("list").splitlines()
    assert header.split() == ["ID", "PROJECT", "NAME", "SCOPES", "STATE", "CREATED", "EXPIRES", "LAST", "USED"]
    assert re.fullmatch(rf"{key_id}  team a   -     admin,read  active  [\d-]+ [\d:]+  never    never", row)


@pytest.mark.parametrize(
    ("columns", "header", "row"),
    [
        (
            130,
            "ID PROJECT NAME SCOPES STATE CREATED EXPIRES LAST USED",
            "research Ada's laptop inference revoked DATE TIME DATE TIME never",
        ),
        (
            115,
            "ID PROJECT NAME SCOPES STATE CREATED EXPIRES LAST USED",
            "research Ada's laptop inference revoked DATE DATE never",
        ),
        (
            100,
            "ID PROJECT NAME SCOPES STATE EXPIRES LAST USED",
            "research Ada's laptop inference revoked DATE never",
        ),
        (90, "ID PROJECT NAME SCOPES EXPIRES LAST USED", "research Ada's laptop inference revoked never"),
        (80, "ID PROJECT NAME SCOPES EXPIRES LAST USED", "research Ada's la… inference revoked never"),
        (1, "ID PROJECT NAME SCOPES EXPIRES LAST USED", "resear… Ada's… inference revoked never"),
    ],
)
def test_table_of_keys_fits_the_terminal(
    keys: Run, columns: int, header: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = load(keys("create", "--project", "research", "--name", "Ada's laptop", "--expires", "30d", "--json"))
    keys("revoke", created["id"])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = keys("list").splitlines()
    assert columns == 1 or max(map(len, lines)) <= columns
    shown = re.sub(r"\d{4}-\d\d-\d\d", "DATE", re.sub(r"\d\d:\d\d", "TIME", lines[1]))
    assert (lines[0].split(), shown.split()) == (header.split(), [created["id"], *row.split()])


def test_revoked_key_is_listed_as_revoked(keys: Run) -> None:
    created = load(keys("create", "--project", "p", "--json"))
    assert keys("revoke", created["id"]) == f"{created['id']} is revoked.\n"
    assert keys("revoke", created["id"]) == f"{created['id']} was revoked already.\n"
    assert [key["status"] for key in load(keys("list", "--json"))] == ["revoked"]
    assert "is revoked. Create a new one." in keys("rotate", created["id"], "--json", status=1)


def test_rotated_key_has_the_same_fields_and_a_new_secret(keys: Run) -> None:
    created = load(keys("create", "--project", "p", "--scope", "read", "--expires", "2h", "--json"))
    rotated = load(keys("rotate", created["id"], "--json"))
    assert rotated == {**created, "key": rotated["key"]}
    assert rotated["key"] != created["key"]
    renewed = load(keys("rotate", created["id"], "--expires", "3h", "--json"))
    assert renewed["expires_at"] >= created["expires_at"] + 3600
    assert len(load(keys("list", "--json"))) == 1


@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_unknown_key_id_is_an_error(keys: Run, command: str) -> None:
    assert keys(command, "key_x", status=1) == (
        "antiphon: There is no key 'key_x'. 'antiphon keys list' shows the ids.\n"
    )


@pytest.mark.parametrize("command", [["list"], ["revoke", "key_x"], ["rotate", "key_x"]])
def test_store_is_created_only_with_a_key(path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", *command, "--store", f"sqlite:///{path}"]) == (0 if command == ["list"] else 1)
    expected = f"antiphon: warning: there is no store at {path}\n" if command == ["list"] else "There is no key 'key_x'"
    assert expected in capsys.readouterr().err
    assert not path.exists()


def test_memory_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list", "--store", "memory:"]) == 1
    assert "A memory store has no lasting keys" in capsys.readouterr().err


def test_store_that_a_stateless_server_does_not_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_STATELESS", "1")
    assert main(["keys", "list"]) == 1
    assert "a stateless server has no keys in a store" in capsys.readouterr().err
    assert main([*["keys", "list"], "--store", f"sqlite:///{tmp_path}/other.db"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--expires", "0d"], "--expires: '0d' is not a time"),
        (["--expires", "30"], "--expires: '30' is not a time"),
        (["--expires", "-1d"], "--expires: '-1d' is not a time"),
        (["--expires", "1.5h"], "--expires: '1.5h' is not a time"),
        (["--expires", "36501d"], "at most 36500d"),
        (["--expires", "9" * 5000 + "d"], "is not a time"),
        (["--scope", "write"], "--scope: invalid choice: 'write'"),
        (["--project", " "], "--project: ' ' is not a line"),
        (["--name", "a\nb"], "--name"),
    ],
)
def test_invalid_option_is_a_usage_error(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["keys", "create", "--project", "p", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_project_gets_as_many_keys_as_the_settings_allow(keys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_MAX_KEYS", "1")
    created = load(keys("create", "--project", "p", "--json"))
    message = "This project has 1 API keys, and at most 1 are allowed (setting max_keys). Revoke some first."
    assert keys("create", "--project", "p", status=1) == f"antiphon: {message}\n"
    keys("revoke", created["id"])
    keys("create", "--project", "p")


def test_archived_project_gets_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/archived.db"

    async def archive() -> None:
        store = locate_store(url)
        await store.open()
        await store.archive_project(StoredProject("old", "old", 1, 2))
        await store.close()

    asyncio.run(archive())
    assert main(["keys", "create", "--project", "old", "--store", url]) == 1
    assert "The project 'old' is archived." in capsys.readouterr().err
    assert main(["keys", "create", "--project", "new", "--store", url]) == 0
