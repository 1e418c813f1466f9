import hashlib
import random
import socket
from pathlib import Path

import pytest

from antiphon.cli.download import download
from antiphon.cli.packages import Wheel
from antiphon.errors import AntiphonError

BODY = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def archive(file_server):
    file_server.files["/a.whl"] = BODY
    return Wheel(url=f"{file_server.url}/a.whl", sha256=SHA256)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "a.whl"


def ignore(there: int, total: int | None) -> None:
    pass


def ranges(file_server) -> list[str | None]:
    return [wanted for _, wanted, _ in file_server.asked]


def test_a_download_arrives_whole_and_reports_its_progress(archive, target):
    reports: list[tuple[int, int | None]] = []
    download(archive, target, report=lambda there, total: reports.append((there, total)))
    assert target.read_bytes() == BODY
    assert reports == sorted(reports)
    assert reports[-1] == (len(BODY), len(BODY))


def test_a_cut_connection_is_taken_up_where_it_ended(archive, target, file_server):
    file_server.cut_after = [100_000, 50_000]
    download(archive, target, report=ignore)
    assert target.read_bytes() == BODY
    assert ranges(file_server) == [None, "bytes=100000-", "bytes=150000-"]


def test_what_an_earlier_run_left_is_continued(archive, target, file_server):
    target.write_bytes(BODY[:123_456])
    download(archive, target, report=ignore)
    assert target.read_bytes() == BODY
    assert ranges(file_server) == ["bytes=123456-"]


def test_a_whole_file_is_not_fetched_again(archive, target, file_server):
    target.write_bytes(BODY)
    download(archive, target, report=ignore)
    assert target.read_bytes() == BODY
    assert ranges(file_server) == [f"bytes={len(BODY)}-"]


def test_a_server_that_ignores_ranges_sends_everything_again(archive, target, file_server):
    file_server.knows_ranges = False
    file_server.cut_after = [100_000]
    download(archive, target, report=ignore)
    assert target.read_bytes() == BODY


def test_a_leftover_that_is_longer_than_the_file_is_dropped(archive, target):
    target.write_bytes(BODY + b"more")
    download(archive, target, report=ignore)
    assert target.read_bytes() == BODY


def test_a_leftover_of_something_else_is_dropped(archive, target, file_server):
    target.write_bytes(b"x" * 1000)
    download(archive, target, report=ignore)
    assert target.read_bytes() == BODY
    assert ranges(file_server) == ["bytes=1000-", None]


def test_a_damaged_download_is_fetched_once_more(archive, target, file_server):
    file_server.damaged = 1
    download(archive, target, report=ignore)
    assert target.read_bytes() == BODY


def test_a_download_that_is_always_damaged_fails_and_leaves_nothing(archive, target, file_server):
    file_server.damaged = 2
    with pytest.raises(AntiphonError, match=r"a\.whl arrives damaged"):
        download(archive, target, report=ignore)
    assert not target.exists()


def test_a_connection_that_brings_nothing_more_ends_with_a_way_to_go_on(archive, target, file_server):
    file_server.cut_after = [1000, 0]
    with pytest.raises(AntiphonError, match=r"stopped after 1000 bytes: .* Run the same command again to continue\."):
        download(archive, target, report=ignore)
    assert target.read_bytes() == BODY[:1000]


def test_a_server_that_is_not_there_is_named_as_the_reason(target):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody else gets this port meanwhile, and nobody listens
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/a.whl"
        with pytest.raises(AntiphonError, match=r"stopped after 0 bytes: .*[Rr]efused"):
            download(Wheel(url=url), target, report=ignore)


def test_a_missing_file_is_reported_with_the_servers_answer(target, file_server):
    with pytest.raises(AntiphonError, match=r"127\.0\.0\.1 does not hand out b\.whl: it answers 404 Not Found\."):
        download(Wheel(url=f"{file_server.url}/b.whl"), target, report=ignore)


def test_a_file_url_is_copied(tmp_path, target):
    source = tmp_path / "source.whl"
    source.write_bytes(BODY)
    download(Wheel(url=source.as_uri(), sha256=SHA256), target, report=ignore)
    assert target.read_bytes() == BODY


def test_credentials_in_the_address_are_sent_to_its_host_alone(archive, target, file_server):
    file_server.redirects["/mirror.whl"] = archive.url
    address = file_server.url.replace("//", "//me:p%40ss@") + "/mirror.whl"
    download(Wheel(url=address, sha256=SHA256), target, report=ignore)
    assert target.read_bytes() == BODY
    assert file_server.asked == [("/mirror.whl", None, "Basic bWU6cEBzcw=="), ("/a.whl", None, None)]


def test_a_directory_that_cannot_be_written_is_the_disks_fault(archive):
    with pytest.raises(FileNotFoundError):
        download(archive, Path("/nonexistent/a.whl"), report=ignore)
