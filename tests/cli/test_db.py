"""`antiphon db`: every row and id survives a move between databases."""

import asyncio
import io
import json
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item, Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import StoredResponse
from antiphon.store.keys import StoredKey
from antiphon.store.location import locate_store
from antiphon.store.sqlite.database import connect

ITEMS: list[Item | Unknown] = [Message("user", f"text {number} \x00 ü", f"msg_{number}") for number in range(4)]


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
    await store.close()


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
            [run._replace(free_since=0) for run in await store.claim("us", as_of=5e9, lease=1, limit=9)],
        ]
    finally:
        await store.release("us")
        await store.close()


def test_export_moves_every_row_between_databases(
    tmp_path: Path, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = f"sqlite:///{tmp_path}/first.db", f"sqlite:///{tmp_path}/second.db"
    asyncio.run(fill(first))
    for source, target in ((first, postgres_url), (postgres_url, second)):
        file = tmp_path / f"{target[:4]}.jsonl"
        assert main(["db", "export", "--store", source, "--output", str(file)]) == 0
        assert main(["db", "import", "--store", target, str(file)]) == 0
        assert "5 responses" in capsys.readouterr().out
    exported = [(tmp_path / f"{scheme}.jsonl").read_text() for scheme in ("post", "sqli")]
    assert exported[0] == exported[1]
    assert json.loads(exported[0].splitlines()[0]) == {"antiphon_export": 1}
    contents = [asyncio.run(read(url)) for url in (first, postgres_url, second)]
    assert contents[0] == contents[1] == contents[2]
    asyncio.run(append(postgres_url))


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "The file is incomplete"),
        (lambda lines: lines[1:], "line 1: this is not an export"),
        (lambda lines: [b'{"antiphon_export":2}\n', *lines[1:]], "has format 2"),
        (lambda lines: [lines[0], *lines[2:]], "but its end says"),
        (lambda lines: [lines[0], b"{\n"], "line 2: "),
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
    target = f"sqlite:///{tmp_path}/target.db"
    assert main(["db", "import", "--store", target]) == 1
    assert message in capsys.readouterr().err
    assert main(["db", "status", "--json", "--store", target]) == 0
    assert set(json.loads(capsys.readouterr().out)["rows"].values()) == {0}


def test_import_needs_an_empty_store(filled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = str(tmp_path / "export")
    assert main(["db", "export", "--store", filled, "--output", export]) == 0
    assert main(["db", "import", "--store", filled, export]) == 1
    assert "is not empty: it has responses" in capsys.readouterr().err
    assert main(["db", "export", "--store", filled, "--output", export]) == 1
    assert "File exists" in capsys.readouterr().err


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


def test_memory_store_has_no_database(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "status", "--store", "memory:"]) == 1
    assert "A memory store has no database" in capsys.readouterr().err
