import pytest

from antiphon.cli.main import main


@pytest.fixture
def note(home):
    path = home / "note.txt"
    path.write_text("The Danube flows through Vienna.")
    return str(path)


def test_file_is_added_listed_and_removed(server, note, capsys):
    assert main(["files", "add", note, "--url", server.url]) == 0
    file_id, name = capsys.readouterr().out.split()
    assert (file_id.startswith("file-"), name) == (True, "note.txt")
    assert main(["files", "list", "--purpose", "user_data", "--url", server.url]) == 0
    assert capsys.readouterr().out.split() == [file_id, "32", "user_data", "note.txt"]
    assert main(["files", "rm", file_id, "--url", server.url]) == 0
    assert main(["files", "rm", file_id, "--url", server.url]) == 1
    assert capsys.readouterr().err == f"antiphon: No such File object: {file_id}\n"


def test_missing_file_is_one_line_and_exit_1(server, home, capsys):
    assert main(["files", "add", "missing.txt", "--url", server.url]) == 1
    assert capsys.readouterr() == ("", "antiphon: Cannot read missing.txt: No such file or directory.\n")


def test_store_is_created_from_files_listed_and_searched(server, note, home, capsys):
    pytest.importorskip("onnxruntime")
    (home / "bad.bin").write_bytes(bytes(range(256)))
    assert main(["stores", "create", "facts", note, "bad.bin", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert shown.err == "bad.bin: Files of type '.bin' are not supported: the file is not text.\n"
    store_id, name = shown.out.split()
    assert name == "facts"
    assert main(["files", "add", note, "--to", store_id, "--url", server.url]) == 0
    capsys.readouterr()
    assert main(["stores", "list", "--url", server.url]) == 0
    assert capsys.readouterr().out.split() == [store_id, "completed", "2/3", "files", "facts"]
    assert main(["stores", "search", store_id, "river in Vienna", "--limit", "1", "--url", server.url]) == 0
    first, text = capsys.readouterr().out.splitlines()
    assert first.split()[1] == "note.txt"
    assert text.strip() == "The Danube flows through Vienna."
