"""`antiphon doctor`: each check with its state and what to do, and never a secret."""

import base64
import json
import os
import socket
import sqlite3
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from antiphon.cli import doctor_checks, extras
from antiphon.cli.main import main
from antiphon.config.loading import load
from antiphon.config.settings import Settings
from antiphon.engine.assembly import build_engine
from antiphon.store.migration_files import read_migrations
from antiphon.tools.hosted.code_interpreter import prepare
from support.postgres_server import EmptySchema
from support.upstream_server import Reply, json_of, serve
from support.upstream_thread import ThreadedServer

LISTED = json_of({"data": [{"id": f"m{number}"} for number in range(7)]})


@pytest.fixture
def diagnose(home: Path, script: Path, capfd) -> Callable[..., tuple[int, dict[str, dict[str, str]]]]:
    """Return a function that runs the command with settings. It returns its status, and the findings by name."""

    def run(text: str = "", *, backends: str = '[backends.demo]\nkind = "scripted"\nscript = "script.json"') -> Any:
        # Without a port, another server on the machine would be a problem.
        port = "" if text.startswith("port") else "port = 0\n"
        (home / "antiphon.toml").write_text(f"{port}{text}\n{backends}")
        status = main(["doctor", "--json"])
        out, err = capfd.readouterr()
        assert err == ""
        assert "secret" not in out
        report = json.loads(out)
        found = {finding["name"]: finding for finding in report["checks"]}
        assert status == (1 if report["status"] == "problem" else 0)
        return status, found

    return run


@pytest.fixture
def upstream() -> Iterator[Callable[[Reply], str]]:
    started: list[ThreadedServer] = []

    def start(reply: Reply) -> str:
        started.append(ThreadedServer(serve([], fixed={"/v1/models": reply})))
        return started[-1].url

    yield start
    for server in started:
        server.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_new_installation_is_ok_and_nothing_is_created(home, script, capfd):
    port = free_port()
    (home / "antiphon.toml").write_text(f'port = {port}\n[backends.demo]\nkind = "scripted"\nscript = "script.json"')
    assert main(["doctor"]) == 0
    lines = capfd.readouterr().out.splitlines()
    data = home / ".local/share/antiphon"
    others = (" disk ", " clock ", " extras ", " code sandbox ")
    assert [line for line in lines if all(name not in line for name in others)] == [
        "ok       settings      antiphon.toml",
        f"ok       store         {data}/antiphon.db does not exist yet: the first start creates it",
        f"ok       seal keys     {data}/seal.keys does not exist yet: the first start creates it",
        "ok       backend demo  scripted, reachable, models: scripted",
        f"ok       port          {port} on 127.0.0.1 is free: no server is running",
    ]
    assert sorted(path.name for path in home.iterdir()) == ["antiphon.toml", "script.json"]


def test_running_server_and_its_store_are_recognized(serve, home, diagnose):
    with serve() as server:
        port = server.url.rpartition(":")[2]
        status, found = diagnose(f"port = {port}")
    newest = read_migrations("sqlite")[-1].version
    path = home / ".local/share/antiphon/antiphon.db"
    assert (status, found["port"]["message"], found["store"]["message"]) == (
        0,
        f"a server is running at {server.url} and is ready",
        f"sqlite:///{path}, schema version {newest}, can be written to",
    )
    assert found["seal keys"]["message"] == f"1 in {path.with_name('seal.keys')}"


def test_port_of_another_program_is_a_problem(diagnose):
    other = ThreadedServer(serve([], fixed={"/": json_of({"name": "another"})}))
    port = other.url.removesuffix("/v1").rpartition(":")[2]
    status, found = diagnose(f"port = {port}")
    other.close()
    assert (status, found["port"]["status"], found["port"]["message"]) == (
        1,
        "problem",
        f"Port {port} on 127.0.0.1 is in use. Stop the other program, or choose another port.",
    )


@pytest.mark.parametrize(
    ("reply", "state", "message"),
    [
        (LISTED, "ok", "chat_completions, reachable, models: m0, m1, m2, m3, m4 and 2 more"),
        (json_of({"data": []}), "warning", "chat_completions, reachable, but it lists no models"),
        (Reply(status=404), "warning", "chat_completions, reachable, but it does not list its models"),
        (Reply(status=401, body=b'{"error": {"message": "Bad key sk-upstream-secret"}}'), "problem", None),
        (Reply(body=b"<html>"), "problem", "The upstream's answer is not JSON."),
    ],
)
def test_upstream_is_requested_for_its_models(upstream, diagnose, reply, state, message):
    options = f'kind = "chat_completions"\nbase_url = "{upstream(reply)}"\napi_key = "sk-upstream-secret"'
    status, found = diagnose(backends=f'[backends.up]\n{options}\nmodels = ["m0"]')
    finding = found["backend up"]
    assert (status, finding["status"]) == (1 if state == "problem" else 0, state)
    assert message is None or finding["message"] == message
    assert (finding["advice"] == "") == (state == "ok")


def test_wrong_path_of_an_upstream_is_a_problem(upstream, diagnose):
    url = upstream(LISTED).removesuffix("/v1")
    status, found = diagnose(backends=f'[backends.up]\nkind = "responses"\nbase_url = "{url}/v2"')
    assert (status, found["backend up"]["status"]) == (1, "problem")


def test_unreachable_upstream_and_missing_weights_are_problems(diagnose):
    status, found = diagnose(
        backends=f"""
        [backends.up]
        kind = "responses"
        base_url = "http://127.0.0.1:{free_port()}/v1"
        [backends.absent]
        kind = "embedded"
        model = "absent-model"
        """
    )
    assert (status, found["backend up"]["status"], found["settings"]["status"]) == (1, "problem", "ok")
    assert found["backend absent"]["message"] == (
        "There are no weights for 'absent-model' on this machine. Get them with: antiphon pull absent-model"
    )


def test_weights_must_be_a_gguf_file(home, diagnose):
    for name, content in (("good", b"GGUF rest"), ("bad", b"<html>")):
        (home / f"{name}.gguf").write_bytes(content)
    embedded = '[backends.{0}]\nkind = "embedded"\nmodel = "{0}"\nweights = "{0}.gguf"\n'
    status, found = diagnose(backends=embedded.format("good") + embedded.format("bad"))
    assert (status, found["backend good"]["status"], found["backend bad"]["message"]) == (
        1,
        "ok",
        "bad.gguf is not a GGUF file",
    )


def make_database(path: Path, version: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


@pytest.mark.parametrize(
    ("version", "state", "message"),
    [
        (10_000, "problem", "has schema version 10000, this program supports up to"),
        (1, "warning", "schema version 1, "),
        (0, "warning", "no tables yet"),
    ],
)
def test_schema_version_of_the_store_is_checked(home, diagnose, version, state, message):
    make_database(home / "store.db", version)
    _, found = diagnose(f'store = "sqlite:///{home}/store.db"')
    assert found["store"]["status"] == state
    assert message in found["store"]["message"]


def test_tables_of_another_program_are_a_problem(home, diagnose, postgres_server):
    connection = sqlite3.connect(home / "store.db")
    connection.executescript("CREATE TABLE items (id); CREATE TABLE orders (id); CREATE TABLE responses (id)")
    connection.close()
    schema = EmptySchema(postgres_server)
    try:
        schema.execute("CREATE TABLE items (id int); CREATE TABLE orders (id int); CREATE TABLE responses (id int)")
        found = [diagnose(f'store = "{url}"')[1]["store"] for url in (f"sqlite:///{home}/store.db", schema.url)]
    finally:
        schema.remove()
    text, advice = (
        "has tables of another program: items, responses",
        "Use another file, or a database or a schema of its own.",
    )
    assert found == [
        make_finding("store", f"sqlite:///{home}/store.db {text}", "problem", advice),
        make_finding("store", f"{postgres_server} {text}", "problem", advice),
    ]


def test_database_of_files_is_checked(home, diagnose, capfd):
    store = f'store = "sqlite:///{home}/store.db"'
    assert main(["db", "migrate", "--store", f"sqlite:///{home}/store.db"]) == 0
    capfd.readouterr()
    database = home / "store.db-files" / "files.db"
    database.parent.mkdir()
    make_database(database, 0)
    assert diagnose(store)[1]["store"]["status"] == "ok"
    make_database(database, 999)
    newer = diagnose(store)
    database.write_bytes(b"not a database, " * 100)
    damaged = diagnose(store)
    assert [(status, found["store"]["status"]) for status, found in (newer, damaged)] == [(1, "problem")] * 2
    assert newer[1]["store"]["message"].startswith(f"{database} has schema version 999, this program supports up to ")
    assert damaged[1]["store"]["message"] == f"The store {database} cannot be opened: file is not a database."


def test_file_that_is_no_database_is_a_problem(home, diagnose):
    (home / "store.db").write_bytes(b"not a database, " * 100)
    status, found = diagnose(f'store = "sqlite:///{home}/store.db"')
    assert (status, found["store"]["message"]) == (
        1,
        f"The store {home}/store.db cannot be opened: file is not a database.",
    )


def test_store_that_cannot_be_created_is_a_problem(home, diagnose):
    (home / "file").touch()
    status, found = diagnose(f'store = "sqlite:///{home}/file/store.db"')
    assert (status, found["store"]["message"]) == (1, f"{home}/file is not a folder")


def test_full_disk_is_a_problem(home, diagnose):
    status, found = diagnose(f"store_min_free_bytes = {10**17}")
    assert (status, found["disk"]["status"]) == (1, "problem")


def test_small_free_space_is_shown_in_megabytes(home, diagnose, monkeypatch):
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda folder: Namespace(free=24_000_000))
    text, advice = "24 MB are free at ", "Free some space, or shorten retention_days."
    _, found = diagnose()
    assert found["disk"] == make_finding("disk", text + str(home), "warning", advice)


def test_unreachable_database_is_a_problem_without_its_password(diagnose):
    pytest.importorskip("asyncpg")
    status, found = diagnose(f'store = "postgresql://ada:pg-secret@127.0.0.1:{free_port()}/antiphon"')
    assert (status, found["store"]["status"]) == (1, "problem")
    assert "the connection was refused" in found["store"]["message"]
    assert found["store"]["advice"].startswith("Check that PostgreSQL is running, and the address")


def test_migrated_postgres_database_is_ok(postgres_url, diagnose, capfd):
    assert main(["db", "migrate", "--store", postgres_url]) == 0
    capfd.readouterr()
    _, found = diagnose(f'store = "{postgres_url}"')
    assert (found["store"]["status"], found["clock"]["status"]) == ("ok", "ok")
    assert found["store"]["message"].endswith("can be written to")
    assert found["nodes"] == make_finding("nodes", "none is running on this database")


@pytest.mark.parametrize(("seconds", "status"), [(-172_800, "problem"), (172_800, "problem"), (3600, "warning")])
async def test_clock_that_differs_from_the_database_is_reported(
    postgres_url, home, monkeypatch, seconds: int, status: str
) -> None:
    read_time = time.time
    monkeypatch.setattr(time, "time", lambda: read_time() + seconds)
    found = await doctor_checks.check_store(Settings(store=postgres_url, data_dir=home, backends={}))
    assert [(each.name, each.status) for each in found] == [("store", "ok"), ("clock", status)]


def test_shared_folder_of_files_is_checked(postgres_url, home, diagnose, capfd):
    assert main(["db", "migrate", "--store", postgres_url]) == 0
    capfd.readouterr()
    (home / "file").touch()
    folders = (home / "new" / "folder", home / "file")
    found = [diagnose(f'store = "{postgres_url}"\n[files]\ndirectory = "{each}"')[1]["store"] for each in folders]
    assert found[0]["status"] == "ok"
    assert found[1] == make_finding("store", f"{home}/file is not a folder", "problem", "Set another files.directory.")


def test_database_that_cannot_be_written_to_is_a_problem_with_its_remedy(postgres_url, diagnose, capfd):
    assert main(["db", "migrate", "--store", postgres_url]) == 0
    capfd.readouterr()
    url = f"{postgres_url}&default_transaction_read_only=on"
    status, found = diagnose(f'store = "{url}"\nseal_keys = ["c2VjcmV0"]')
    assert (status, found["store"]["status"], "nodes" in found) == (1, "problem", False)
    assert "Turn default_transaction_read_only off for its user" in found["store"]["message"]
    assert "rights of this user" in found["store"]["advice"]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ("search_path=missing", "the search_path of its user has no schema that exists and that it may use. Create"),
        ("role=pg_signal_backend", "no schema that exists and that it may use. Create the schema, grant it USAGE on"),
        ("role=pg_monitor", "its user may not create tables in the schema {schema}. Grant it CREATE on the schema"),
    ],
)
def test_schema_without_tables_that_cannot_be_used_is_a_problem(
    postgres_server, diagnose, change: str, refusal: str
) -> None:
    schema = EmptySchema(postgres_server)
    try:
        schema.execute(f"GRANT USAGE ON SCHEMA {schema.name} TO pg_monitor")
        status, found = diagnose(f'store = "{schema.url}&{change}"')
    finally:
        schema.remove()
    assert (status, found["store"]["status"]) == (1, "problem")
    assert refusal.format(schema=schema.name) in found["store"]["message"]


def make_finding(name: str, message: str, status: str = "ok", advice: str = "") -> dict[str, str]:
    return {"name": name, "status": status, "message": message, "advice": advice}


async def test_settings_of_running_nodes_are_compared(postgres_url, home):
    secret = base64.b64encode(bytes(32)).decode()
    settings = Settings(store=postgres_url, data_dir=home, backends={}, seal_keys=(secret,))
    engine = build_engine(settings)
    name = f"{socket.gethostname()} (process {os.getpid()})"
    advice = "Use the same version and settings on all nodes, and synchronize their clocks, for example with NTP."
    await engine.start()
    try:
        await engine.admin_store.peer_link.wait_connected()
        same = await doctor_checks.check_nodes(settings)
        other = await doctor_checks.check_nodes(replace(settings, retention_days=3.0))
        unknown = await doctor_checks.check_nodes(replace(settings, seal_keys=()))
    finally:
        await engine.close()
    assert same == [doctor_checks.ok("nodes", f"1 with these settings: {name}")]
    text = f"the node {name} has other settings: retention_days"
    assert other == [doctor_checks.warning("nodes", text, advice)]
    text = "running: 1. The settings have no seal_keys to compare with theirs"
    assert unknown == [doctor_checks.warning("nodes", text, "Set the seal_keys of the nodes.")]
    assert list(home.iterdir()) == []


def test_seal_keys_are_checked(home, diagnose):
    path = home / ".local/share/antiphon/seal.keys"
    path.parent.mkdir(parents=True)
    path.write_text("c2VjcmV0")
    assert diagnose()[1]["seal keys"]["message"] == f"{path}: key 1 is not 32 bytes in base64."
    path.write_text("A" * 43 + "=")
    path.chmod(0o644)
    assert diagnose()[1]["seal keys"] == {
        "name": "seal keys",
        "status": "warning",
        "message": f"other users may access {path}",
        "advice": f"Run: chmod 600 {path}",
    }


def test_folder_of_the_seal_keys_is_checked(home, diagnose, monkeypatch):
    folder = home / "data"
    path = folder / "seal.keys"
    settings = f'data_dir = "{folder}"'
    folder.write_text("")
    assert diagnose(settings)[1]["seal keys"] == make_finding(
        "seal keys", f"{folder} is not a folder", "problem", "Set data_dir or seal_keys."
    )
    folder.unlink()
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # the tests may run as root
        assert diagnose(settings)[1]["seal keys"] == make_finding(
            "seal keys", f"{path} cannot be created: no permission for {folder}", "problem", "Change the permissions."
        )
    path.write_text("A" * 43 + "=")
    path.chmod(0o600)
    folder.chmod(0o775)  # the default of systems where each user has a group, and of volumes in Kubernetes
    assert diagnose(settings)[1]["seal keys"] == make_finding("seal keys", f"1 in {path}")
    warned = make_finding("seal keys", f"other users may replace {path}", "warning", f"Run: chmod go-w {folder}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getegid", lambda: folder.stat().st_gid + 1)
        assert diagnose(settings)[1]["seal keys"] == warned
    folder.chmod(0o757)
    assert diagnose(settings)[1]["seal keys"] == warned
    folder.chmod(0o1777)
    assert diagnose(settings)[1]["seal keys"] == make_finding("seal keys", f"1 in {path}")


def test_wrong_settings_are_problems(home, script, capfd):
    (home / "antiphon.toml").write_text('prot = 1\nport = "x"')
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["status"] == "problem"
    assert [(each["status"], each["message"]) for each in report["checks"][:2]] == [
        ("problem", "antiphon.toml: unknown setting 'prot'. Did you mean port?"),
        ("problem", "antiphon.toml: port: Expected `int`, got `str`."),
    ]


def test_library_that_cannot_be_loaded_is_a_problem(diagnose, home, monkeypatch):
    packages = home / "packages"
    packages.mkdir()
    (packages / "xllamacpp.py").write_text("raise ImportError('libgomp.so.1: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
    monkeypatch.syspath_prepend(packages)
    status, findings = diagnose(backends='[backends.embedded]\nkind = "embedded"')
    assert (status, findings["backend embedded"]) == (
        1,
        {
            "name": "backend embedded",
            "status": "problem",
            "message": (
                "The embedded model needs a library that this system lacks: libgomp.so.1: cannot open shared object "
                "file. Install it with 'apt install libgomp1' (Debian, Ubuntu) or 'dnf install libgomp' (Fedora, RHEL)."
            ),
            "advice": "Install what is missing, or set another backend.",
        },
    )


def test_missing_package_is_a_problem_only_if_the_settings_need_it(monkeypatch):
    monkeypatch.setattr(extras, "_is_installed", lambda package: package not in ("xllamacpp", "numpy"))
    settings = load(None, {"HOME": "/home/ada"}, {})
    assert doctor_checks.check_extras(settings) == [
        doctor_checks.problem("extras", "embedded needs xllamacpp", "Run: pip install 'antiphon[embedded]'"),
        doctor_checks.ok(
            "extras", "installed: code, mcp, otel, postgres; not installed and not needed by the settings: search"
        ),
    ]


def test_clock_before_the_installation_is_a_problem(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert doctor_checks.check_clock().message == "1970-01-01 00:00:00 UTC is before this program was installed"


def test_state_of_the_compiled_interpreter_is_shown(
    home: Path, diagnose: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(home))
    for module in (doctor_checks, prepare):
        monkeypatch.setattr(module, "name_compiled_file", lambda: "name.cwasm")
    folder = home / "compiled"
    settings = f"[code_interpreter]\ncache_dir = '{folder}'\n"

    def show(more: str = "") -> dict[str, str]:
        finding: dict[str, str] = diagnose(settings + more)[1]["code sandbox"]
        return finding

    new = f"not compiled yet: the next start of a server compiles it into {folder}"
    assert show() == {"name": "code sandbox", "status": "ok", "message": new, "advice": ""}
    assert show("compile_at_start = false") == {
        "name": "code sandbox",
        "status": "warning",
        "message": f"not compiled: the first call compiles it into {folder}, which takes minutes",
        "advice": "Run: python -m antiphon.tools.hosted.code_interpreter.prepare",
    }
    with prepare.lock_compilation(folder):
        assert show()["message"].startswith(f"being compiled into {folder}, for ")
        (folder / "name.cwasm").touch(mode=0o600)
        assert show()["message"] == f"compiled in {folder}; a faster version is being compiled"
    assert show()["message"] == f"compiled in {folder}"
    assert "code sandbox" not in diagnose(settings + "enabled = false")[1]
