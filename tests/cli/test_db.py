"""`antiphon db`: every row and id survives a move between databases."""

import asyncio
import hashlib
import io
import json
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from antiphon.cli.main import main
from antiphon.cli.run_options import LEDGER_FILE
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item, Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import StoredResponse
from antiphon.store.containers import ContainerFileRow, ContainerLimits, ContainerRow, ContainerStore
from antiphon.store.files.content import Contents
from antiphon.store.files.rows import ChunkRow, FileRow, NewEntry, PartRow, StoreRow, UploadRow
from antiphon.store.keys import StoredKey
from antiphon.store.ledger import SqliteLedger
from antiphon.store.limits import DEFAULT_LIMITS
from antiphon.store.location import locate_files, locate_ledger, locate_store
from antiphon.store.sqlite.database import connect
from antiphon.store.transfer import TransferStore
from support.postgres_server import EmptySchema

ITEMS: list[Item | Unknown] = [Message("user", f"text {number} \x00 ü", f"msg_{number}") for number in range(4)]

FILE_IDS = ("file-1", "file-2", "file-empty")
FILES = [
    FileRow("file-1", 1, None, "a\x00ü.txt", 6, "assistants"),
    FileRow("file-2", 2, 4_000_000_000, "large.bin", 1_200_000, "user_data"),
    FileRow("file-empty", 3, None, "", 0, "batch"),
]
CHUNKS = [ChunkRow(0, "Apples \x00 and pears", bytes(range(8))), ChunkRow(5, "pears", bytes(8))]
UPLOAD = UploadRow("upload_1", 1, 4_000_000_000, "u", 8, "user_data", "text/plain", 60, "pending")
LIMITS = ContainerLimits(containers=9, container_files=9, container_bytes=99, project_bytes=99)
CONTAINER = ContainerRow(
    id="cntr_1",
    name="ü",
    created_at=1,
    last_active_at=4_000_000_000,
    idle_seconds=60,
    memory_limit="1g",
    interpreter="x",
)
CONTAINER_FILE = ContainerFileRow(
    id="cfile_1",
    container_id="cntr_1",
    path="sub/ü.txt",
    bytes=4,
    source="assistant",
    created_at=1,
    modified_ns=1_700_000_000_123_456_789,
    origin="file-1",
)


def make_stored(response_id: str, *, previous: str | None = None, status: str = "completed") -> StoredResponse:
    response = Response(
        id=response_id, created_at=1, status=status, model="m", previous_response_id=previous, output=ITEMS[2:]
    )
    return StoredResponse(response=response, input=ITEMS[:2], expires_at=4_000_000_000)


async def fill(url: str) -> None:
    store = locate_store(url)
    await store.open()
    await store.save("p", make_stored("resp_z"))
    await store.save("p", make_stored("resp_a", previous="resp_z"))
    await store.save("q", make_stored("resp_a"))
    await store.create_conversation("p", Conversation("conv_1", 1, {"a": "b"}), ITEMS[:3])
    await store.delete_item("p", "conv_1", "msg_2")
    await store.save("p", make_stored("resp_c"), conversation="conv_1")
    await store.enqueue("p", make_stored("resp_q", status="queued"), b"\x00request")
    await store.append_events("p", "resp_q", 0, [b'{"a":1}', b"{}"])
    await store.append_events("p", "resp_q", 2, [b"[]"])
    await store.save_prompt("p", "pmpt_1", "2", b"{}", 1)
    await store.save_prompt("p", "pmpt_1", "1", b"{ }", 2)
    await store.save_key(StoredKey("key_1", b"\x00\xff", "p", "ü", ("admin", "read"), 1, 2, 3, 4))
    assert isinstance(store, ContainerStore)
    await store.create_container("p", CONTAINER, limits=LIMITS)
    await store.add_container_file("p", CONTAINER_FILE, limits=LIMITS)
    await store.close()


async def fill_files(url: str) -> None:
    database, contents = await locate_files(url).open(now=None, limits=DEFAULT_LIMITS)
    for file in FILES:
        await write_content(contents, file.id, file.id.encode() * (file.bytes // len(file.id)))
        await database.save_file("p", file)
    row = StoreRow("vs_1", 1, 2, "rooms", None, {"a": "b"}, 3, "model", False)
    entries = [NewEntry(file.id, {"n": 1.5, "is": True}, 800, 400) for file in FILES]
    await database.create_vector_store("p", row, [])
    await database.attach_files("p", "vs_1", entries, batch_id="vsfb_1")
    job = await database.claim_indexing("one", lease=1)
    assert job is not None
    await database.append_chunks("one", job.position, CHUNKS, lease=1)
    await database.finish_indexing("one", job.position, "completed")
    await database.save_upload("p", UPLOAD)
    await write_content(contents, "part_1", b"part")
    await database.save_part("p", UPLOAD.id, PartRow("part_1", 1, 4))
    await database.close()
    await contents.close()


async def write_content(contents: Contents, content_id: str, data: bytes) -> None:
    writer = await contents.start_writing()
    await writer.write(data)
    await writer.commit(content_id)


async def read_files(url: str) -> list[object]:
    database, contents = await locate_files(url).open(now=None, limits=DEFAULT_LIMITS)
    try:
        store = await database.load_vector_store("p", "vs_1")
        assert store is not None
        jobs = await database.claim_indexing("two", lease=1)
        assert jobs is not None
        await database.release_indexing("two", jobs.position)
        added = FileRow("file-new", 1, None, "new.txt", 0, "assistants")
        await database.save_file("q", added)  # with a position of its own
        await database.delete_file("q", added.id)
        return [
            await database.list_files("p", purpose=None, after=None, limit=10, order="asc"),
            [hashlib.sha256(await contents.read_whole(content)).hexdigest() for content in (*FILE_IDS, "part_1")],
            store,
            await database.list_entries(
                "p", "vs_1", status=None, batch_id="vsfb_1", after=None, before=None, limit=10, order="asc"
            ),
            await database.count_entries("p", ["vs_1"]),
            await database.match_words(store.scope, ["apples"], limit=5),
            await database.load_upload("p", UPLOAD.id),
            await database.load_parts("p", UPLOAD.id),
            jobs,
        ]
    finally:
        await database.close()
        await contents.close()


async def read(url: str) -> list[object]:
    store = locate_store(url)
    await store.open()
    try:
        return [
            await store.load("p", "resp_z"),
            [link.id for link in await store.load_chain("p", "resp_a")],
            await store.load("q", "resp_a"),
            await store.load_conversation("p", "conv_1"),
            await store.load_conversation_items("p", "conv_1"),
            await store.load_conversation_items("p", "conv_1", before="resp_c"),
            await store.list_items("p", "conv_1", after="msg_2", limit=9, order="asc"),
            await store.find_item("p", "msg_0"),
            await store.read_events("p", "resp_q", 0),
            await store.load_prompt("p", "pmpt_1", None),
            await store.list_keys(),
            await store.load_container("p", CONTAINER.id),  # type: ignore[attr-defined]
            [
                msgspec.structs.replace(file, content=None)
                for file in await store.load_container_files("p", CONTAINER.id)  # type: ignore[attr-defined]
            ],
            [run._replace(free_since=0) for run in await store.claim("us", as_of=5e9, lease=1, limit=9)],
        ]
    finally:
        await store.release("us")
        await store.close()


def test_export_moves_every_row_between_databases(
    tmp_path: Path, postgres_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = f"sqlite:///{tmp_path}/first.db", f"sqlite:///{tmp_path}/second.db"
    asyncio.run(fill(first))
    asyncio.run(fill_files(first))
    code_file = tmp_path / f"first.db-containers/{CONTAINER.id}/data/{CONTAINER_FILE.path}"
    code_file.parent.mkdir(parents=True)
    code_file.write_bytes(b"code")
    folders = tmp_path / "one", tmp_path / "two"
    asyncio.run(fill_ledger(folders[0]))
    for source, target, folder in ((first, postgres_url, folders[0]), (postgres_url, second, folders[1])):
        monkeypatch.setenv("ANTIPHON_DATA_DIR", str(folder))
        file = tmp_path / f"{target[:4]}.jsonl"
        assert main(["db", "export", "--store", source, "--output", str(file)]) == 0
        assert main(["db", "import", "--store", target, str(file)]) == 0
        assert "5 responses" in capsys.readouterr().out
    exported = [(tmp_path / f"{scheme}.jsonl").read_text() for scheme in ("post", "sqli")]
    assert exported[0] == exported[1]
    assert json.loads(exported[0].splitlines()[0]) == {"antiphon_export": 1}
    contents = [asyncio.run(read(url)) for url in (first, postgres_url, second)]
    assert contents[0] == contents[1] == contents[2]
    ledgers = [(first, folders[0]), (postgres_url, tmp_path), (second, folders[1])]
    runs = [asyncio.run(read_ledger(url, folder)) for url, folder in ledgers]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][:2] == [["run_a", "run_z"], [b'{"n":1}', b"\x00\xff"]]
    files = [asyncio.run(read_files(url)) for url in (first, postgres_url, second)]
    assert files[0] == files[1] == files[2]
    moved = Path(str(code_file).replace("first.db", "second.db"))
    assert (moved.read_bytes(), moved.stat().st_mtime_ns) == (b"code", CONTAINER_FILE.modified_ns)
    asyncio.run(append(postgres_url))


async def fill_ledger(folder: Path) -> None:
    ledger = SqliteLedger(folder / LEDGER_FILE, now=lambda: 1_000.5)
    await ledger.append("run_z", 0, b'{"n":1}', status="running", title="ü")
    await ledger.append("run_a", 0, b"{}", status="done", title="t")
    await ledger.append("run_z", 1, b"\x00\xff")
    assert await ledger.hold("run_z", "dead", 1e9) is True
    await ledger.close()


async def read_ledger(url: str, folder: Path) -> list[object]:
    """Return the ids of the runs, the entries of one, and other fields. The run has no owner in another database."""
    ledger = locate_ledger(url, folder / LEDGER_FILE)
    try:
        runs = await ledger.runs(limit=9)
        fields = [(run.created_at, run.updated_at, run.status, run.title) for run in runs]
        await ledger.release("run_z", "dead")
        assert await ledger.hold("run_z", "us", 1) is True
        return [[run.run_id for run in runs], list(await ledger.read("run_z")), fields]
    finally:
        await ledger.release("run_z", "us")
        await ledger.close()


def test_import_leaves_runs_of_agents_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(tmp_path))
    asyncio.run(fill(f"sqlite:///{tmp_path}/first.db"))
    asyncio.run(fill_ledger(tmp_path))
    file = tmp_path / "export.jsonl"
    assert main(["db", "export", "--store", f"sqlite:///{tmp_path}/first.db", "--output", str(file)]) == 0
    ledger = SqliteLedger(tmp_path / LEDGER_FILE)
    asyncio.run(ledger.append("run_a", 1, b"new"))
    assert asyncio.run(ledger.delete("run_z", owner="dead")) is True
    asyncio.run(ledger.append("run_z", 0, b"other"))
    assert main(["db", "import", "--store", f"sqlite:///{tmp_path}/second.db", str(file)]) == 0
    assert [list(asyncio.run(ledger.read(run_id))) for run_id in ("run_a", "run_z")] == [[b"{}", b"new"], [b"other"]]


def test_import_without_runs_of_agents_creates_no_ledger(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    monkeypatch.setenv("ANTIPHON_DATA_DIR", str(folder))
    file = tmp_path / "export.jsonl"
    assert main(["db", "export", "--store", filled, "--output", str(file)]) == 0
    assert main(["db", "import", "--store", f"sqlite:///{tmp_path}/second.db", str(file)]) == 0
    (tmp_path / "broken.jsonl").write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    assert main(["db", "import", "--store", f"sqlite:///{tmp_path}/third.db", str(tmp_path / "broken.jsonl")]) == 1
    assert list(folder.iterdir()) == []


async def append(url: str) -> None:
    store = locate_store(url)
    await store.open()
    before = await store.load_conversation_items("p", "conv_1") or []
    await store.append_items("p", "conv_1", [Message("user", "new", "msg_new")])
    assert await store.load_conversation_items("p", "conv_1") == [*before, Message("user", "new", "msg_new")]
    await store.close()


@pytest.fixture
def filled(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/store.db"
    asyncio.run(fill(url))
    return url


def test_export_goes_to_standard_output(filled: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["db", "export", "--store", filled]) == 0
    lines = capfdbinary.readouterr().out.splitlines()
    assert json.loads(lines[1])["id"] == "resp_z"
    assert json.loads(lines[-1])["end"]["responses"] == 5


def test_damaged_json_is_exported_unchanged(filled: str, tmp_path: Path) -> None:
    connection = connect(tmp_path / "store.db")
    connection.execute("UPDATE responses SET body = ? WHERE id = 'resp_z'", (b"{broken",))
    connection.close()
    assert main(["db", "export", "--store", filled, "--output", str(tmp_path / "export")]) == 0
    assert main(["db", "import", "--store", f"sqlite:///{tmp_path}/copy.db", str(tmp_path / "export")]) == 0
    copy = connect(tmp_path / "copy.db")
    assert copy.execute("SELECT body FROM responses WHERE id = 'resp_z'").fetchone() == (b"{broken",)
    copy.close()


def test_link_in_a_container_is_not_followed_by_an_export(filled: str, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "ü.txt").write_text("a secret of this machine")
    data = tmp_path / f"store.db-containers/{CONTAINER.id}/data"
    data.mkdir(parents=True)
    (data / "sub").symlink_to(tmp_path / "outside")
    assert main(["db", "export", "--store", filled, "--output", str(tmp_path / "export")]) == 0
    tables = [json.loads(line).get("table") for line in (tmp_path / "export").read_text().splitlines()]
    assert ("container_files" in tables, "contents" in tables) == (True, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "The file is incomplete"),
        (lambda lines: lines[1:], "line 1: this is not an export"),
        (lambda lines: [b'{"antiphon_export":2}\n', *lines[1:]], "has format 2"),
        (lambda lines: [lines[0], *lines[2:]], "but its end says"),
        (lambda lines: lines + lines, "more lines follow the end of the export. Nothing was imported."),
        (lambda lines: [lines[0], lines[1], *lines[1:]], "refuses a row: UNIQUE constraint failed"),
        (
            lambda lines: [
                lines[0],
                b'{"table":"prompts","created_at":9223372036854775808}\n',
                b'{"end":{"prompts":1}}\n',
            ],
            "refuses a row: Python int too large",
        ),
        (lambda lines: [lines[0], b'{"end":5}\n'], "line 2: end: Expected `object`, got `int`. Nothing was imported."),
        (lambda lines: [lines[0], b'{"table":[]}\n'], "line 2: table: Expected `str`, got `array`"),
        (lambda lines: [lines[0], b"{\n"], "line 2: Input data was truncated. Nothing was imported."),
        (lambda lines: [lines[0], lines[1][:9]], "The file is incomplete: line 2 has no end. Nothing was imported."),
        (lambda lines: [lines[0], b'{"table":"other"}\n'], "line 2: there is no table 'other'"),
        (lambda lines: [lines[0], b'{"table":"prompts","x":1}\n'], "line 2: the table prompts has no field 'x'"),
        (lambda lines: [lines[0], b'{"table":"prompts","id":1}\n'], "line 2: id: Expected `str`, got `int`"),
        (lambda lines: [], "this is not an export of Antiphon"),
    ],
)
def test_broken_export_is_refused_and_nothing_imported(
    filled: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: object,
    message: str,
) -> None:
    export = tmp_path / "export"
    assert main(["db", "export", "--store", filled, "--output", str(export)]) == 0
    assert callable(change)
    broken = b"".join(change(export.read_bytes().splitlines(keepends=True)))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(broken)))
    assert main(["db", "import", "--store", f"sqlite:///{tmp_path}/target.db"]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.glob("target.db*")) == []


def test_row_that_postgresql_refuses_is_an_error_of_the_import(
    postgres_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export = b'{"antiphon_export":1}\n{"table":"prompts","id":"pmpt_1"}\n{"end":{"prompts":1}}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(export)))
    assert main(["db", "import", "--store", postgres_url]) == 1
    assert "refuses a row: null value in column" in capsys.readouterr().err


def test_import_needs_an_empty_store(filled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = str(tmp_path / "export")
    assert main(["db", "export", "--store", filled, "--output", export]) == 0
    assert main(["db", "import", "--store", filled, export]) == 1
    assert "is not empty: it has responses" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without space")
@pytest.mark.parametrize(
    ("output", "message"),
    [
        (["--output", "{folder}"], "to {folder}: File exists."),
        (["--output", "{folder}/none/export"], "to {folder}/none/export: No such file or directory."),
        ([], "to standard output: No space left on device."),
    ],
)
def test_output_of_an_export_that_cannot_be_written_is_named(
    filled: str,
    tmp_path: Path,
    output: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        output = [each.format(folder=tmp_path) for each in output]
        assert main(["db", "export", "--store", filled, *output]) == 1
        monkeypatch.undo()
    expected = f"antiphon: The export cannot be written {message.format(folder=tmp_path)}\n"
    assert capsys.readouterr().err == expected


def test_status_migrate_and_expire_report_the_store(
    postgres_url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for url in (postgres_url, f"sqlite:///{tmp_path}/store.db"):
        assert main(["db", "migrate", "--store", url]) == 0
        assert "has the current schema" in capsys.readouterr().out
        assert main(["db", "expire", "--store", url]) == 0
        assert "0 expired responses and conversations were deleted" in capsys.readouterr().out
        assert main(["db", "status", "--store", url]) == 0
        shown = capsys.readouterr().out
        assert "(current)" in shown
        assert "search_path" not in shown


def test_closed_pipe_ends_the_status_without_a_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    assert main(["db", "migrate", "--store", url]) == 0
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert (main(["db", "status", "--store", url]), capfd.readouterr().err) == (1, "")


@pytest.mark.parametrize(("version", "advice"), [(999, "Use a newer version"), (3, "Run antiphon db migrate first")])
def test_store_of_another_version_is_not_exported(
    tmp_path: Path, postgres_server: str, capsys: pytest.CaptureFixture[str], version: int, advice: str
) -> None:
    schema = EmptySchema(postgres_server)
    with closing(sqlite3.connect(tmp_path / "store.db")) as database:
        database.execute(f"PRAGMA user_version = {version}")
    schema.execute(f"CREATE TABLE antiphon_schema AS SELECT {version} AS version")
    try:
        for url in (schema.url, f"sqlite:///{tmp_path}/store.db"):
            assert main(["db", "export", "--store", url, "--output", str(tmp_path / "export")]) == 1
            assert advice in capsys.readouterr().err
            assert not (tmp_path / "export").exists()
            assert main(["db", "status", "--store", url]) == 0
            assert ("of a newer version of Antiphon" in capsys.readouterr().out) == (version == 999)
    finally:
        schema.remove()


def test_incomplete_export_is_deleted(filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(store: TransferStore) -> AsyncIterator[bytes]:
        yield b"{}\n"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("antiphon.cli.db.export_lines", fail)
        assert main(["db", "export", "--store", filled, "--output", str(tmp_path / "export")]) == 130
    assert not (tmp_path / "export").exists()
    assert main(["db", "export", "--store", filled, "--output", str(tmp_path / "export")]) == 0


def test_expire_and_export_need_an_existing_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["expire"], ["export", "--output", str(tmp_path / "export")], ["status"]):
        assert main(["db", *command, "--store", f"sqlite:///{tmp_path}/new.db"]) == 1
        assert capsys.readouterr().err == f"antiphon: There is no store at {tmp_path}/new.db.\n"
    assert not [*tmp_path.glob("*.db*"), *tmp_path.glob("export")]


def test_contents_in_a_shared_folder_are_moved(
    tmp_path: Path, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = f"sqlite:///{tmp_path}/first.db", f"sqlite:///{tmp_path}/second.db"
    asyncio.run(fill(first))
    asyncio.run(fill_files(first))
    folder, config = tmp_path / "shared", tmp_path / "config.toml"
    config.write_text(f'store = "{postgres_url}"\n[files]\ndirectory = "{folder}"\n')
    exports = [tmp_path / "sqlite.jsonl", tmp_path / "postgres.jsonl"]
    assert main(["db", "export", "--store", first, "--output", str(exports[0])]) == 0
    broken = tmp_path / "broken.jsonl"
    broken.write_text(exports[0].read_text().rpartition('{"end"')[0] + '{"end":{}}\n')
    assert main(["db", "import", "--config", str(config), str(broken)]) == 1
    assert not (folder / "contents").exists()
    assert main(["db", "import", "--config", str(config), str(exports[0])]) == 0
    assert {path.name for path in (folder / "contents").iterdir()} == {*FILE_IDS, "part_1"}
    assert main(["db", "export", "--config", str(config), "--output", str(exports[1])]) == 0
    assert exports[0].read_text() == exports[1].read_text()
    assert main(["db", "import", "--store", second, str(exports[1])]) == 0
    assert asyncio.run(read_files(first)) == asyncio.run(read_files(second))
    capsys.readouterr()
    assert main(["db", "status", "--store", second, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert (rows["files"], rows["chunks"], rows["contents"], rows["containers"]) == (3, 2, 5, 1)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "\x00"])
def test_import_writes_only_to_its_own_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content = json.dumps({"table": "contents", "id": name, "piece": 0, "data_base64": ""})
    export = tmp_path / "export"
    export.write_text(f'{{"antiphon_export":1}}\n{content}\n{{"end":{{"contents":1}}}}\n')
    assert main(["db", "import", "--store", f"sqlite:///{tmp_path}/new/store.db", str(export)]) == 1
    assert "is not the name of a file" in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == []


def test_memory_store_has_no_database(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "status", "--store", "memory:"]) == 1
    assert "A memory store has no database" in capsys.readouterr().err
