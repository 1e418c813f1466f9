import hashlib
import io
import random
import socket
from itertools import count
from pathlib import Path

import pytest

from antiphon.cli.download import ProgressBar, download
from antiphon.cli.packages import Wheel
from antiphon.errors import AntiphonError

BODY = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def wheel(file_server):
    file_server.files["/a.whl"] = BODY
    return Wheel(url=f"{file_server.url}/a.whl", sha256=SHA256)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "a.whl"


def ignore(received: int, total: int | None) -> None:
    pass


def ranges(file_server) -> list[str | None]:
    return [requested for _, requested, _ in file_server.requests]


def test_download_is_complete_and_reports_progress(wheel, target):
    reports: list[tuple[int, int | None]] = []
    download(wheel, target, on_progress=lambda received, total: reports.append((received, total)))
    assert target.read_bytes() == BODY
    assert reports == sorted(reports)
    assert reports[-1] == (len(BODY), len(BODY))


def test_cut_connection_is_continued(wheel, target, file_server):
    file_server.cut_after = [100_000, 50_000]
    download(wheel, target, on_progress=ignore)
    assert target.read_bytes() == BODY
    assert ranges(file_server) == [None, "bytes=100000-", "bytes=150000-"]


def test_partial_file_is_continued(wheel, target, file_server):
    target.write_bytes(BODY[:123_456])
    download(wheel, target, on_progress=ignore)
    assert target.read_bytes() == BODY
    assert ranges(file_server) == ["bytes=123456-"]


def test_complete_file_is_not_downloaded_again(wheel, target, file_server):
    target.write_bytes(BODY)
    download(wheel, target, on_progress=ignore)
    assert target.read_bytes() == BODY
    assert ranges(file_server) == [f"bytes={len(BODY)}-"]


def test_server_without_ranges_sends_everything_again(wheel, target, file_server):
    file_server.supports_ranges = False
    file_server.cut_after = [100_000]
    download(wheel, target, on_progress=ignore)
    assert target.read_bytes() == BODY


def test_partial_file_longer_than_the_download_is_dropped(wheel, target):
    target.write_bytes(BODY + b"more")
    download(wheel, target, on_progress=ignore)
    assert target.read_bytes() == BODY


def test_partial_file_with_other_content_is_dropped(wheel, target, file_server):
    target.write_bytes(b"x" * 1000)
    download(wheel, target, on_progress=ignore)
    assert target.read_bytes() == BODY
    assert ranges(file_server) == ["bytes=1000-", None]


def test_damaged_download_is_repeated(wheel, target, file_server):
    file_server.damaged = 1
    download(wheel, target, on_progress=ignore)
    assert target.read_bytes() == BODY


def test_repeatedly_damaged_download_fails_and_leaves_no_file(wheel, target, file_server):
    file_server.damaged = 2
    with pytest.raises(AntiphonError, match=r"The download of a\.whl is damaged"):
        download(wheel, target, on_progress=ignore)
    assert not target.exists()


def test_download_without_progress_shows_how_to_continue(wheel, target, file_server):
    file_server.cut_after = [1000, 0]
    with pytest.raises(AntiphonError, match=r"stopped after 1000 bytes: .* Run the same command again to continue\."):
        download(wheel, target, on_progress=ignore)
    assert target.read_bytes() == BODY[:1000]


def test_unreachable_server_is_the_reason_of_the_error(target):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: it refuses connections
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/a.whl"
        with pytest.raises(AntiphonError, match=r"stopped after 0 bytes: .*[Rr]efused"):
            download(Wheel(url=url), target, on_progress=ignore)


def test_missing_file_shows_the_status_of_the_server(target, file_server):
    with pytest.raises(
        AntiphonError, match=r"Cannot download b\.whl from 127\.0\.0\.1: the server returned 404 Not Found\."
    ):
        download(Wheel(url=f"{file_server.url}/b.whl"), target, on_progress=ignore)


def test_file_url_is_copied(tmp_path, target):
    source = tmp_path / "source.whl"
    source.write_bytes(BODY)
    download(Wheel(url=source.as_uri(), sha256=SHA256), target, on_progress=ignore)
    assert target.read_bytes() == BODY


def test_credentials_in_the_url_are_sent_only_to_its_host(wheel, target, file_server):
    file_server.redirects["/mirror.whl"] = wheel.url
    address = file_server.url.replace("//", "//me:p%40ss@") + "/mirror.whl"
    download(Wheel(url=address, sha256=SHA256), target, on_progress=ignore)
    assert target.read_bytes() == BODY
    assert file_server.requests == [("/mirror.whl", None, "Basic bWU6cEBzcw=="), ("/a.whl", None, None)]


def test_unwritable_folder_is_a_file_error(wheel):
    with pytest.raises(FileNotFoundError):
        download(wheel, Path("/nonexistent/a.whl"), on_progress=ignore)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_without_a_terminal_is_a_line_per_tenth():
    out = io.StringIO()
    with ProgressBar("tiny", 2_000_000, out) as progress:
        for done in (0, 100_000, 200_000, 390_000, 1_900_000, 2_000_000):
            progress.update(done)
    assert out.getvalue() == "tiny: 10% of 2.0 MB\ntiny: 90% of 2.0 MB\ntiny: 100% of 2.0 MB\n"


def test_continued_download_skips_earlier_progress_lines():
    out = io.StringIO()
    with ProgressBar("tiny", 2_000_000, out) as progress:
        progress.update(1_000_000)
        progress.update(1_200_000)
    assert out.getvalue() == "tiny: 60% of 2.0 MB\n"


def test_terminal_redraws_one_line_with_speed_and_time_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    seconds = count()
    with ProgressBar("tiny", 4_000_000, out, clock=lambda: next(seconds)) as progress:
        progress.update(0)
        progress.update(1_000_000)
    frames = [frame.rstrip(" ") for frame in out.getvalue().split("\r")]
    assert frames == [
        "",
        "tiny  ░░░░░░░░░░░░░░░░░░░░░░░░   0%  0.0/4.0 MB",
        "tiny  ██████░░░░░░░░░░░░░░░░░░  25%  1.0/4.0 MB  1.0 MB/s  0:03 left" + " " * 31 + "\n",
    ]


def test_progress_line_is_cut_to_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    ProgressBar("tiny", 4_000_000, out).update(1_000_000)
    assert out.getvalue() == "\rtiny  ██████░░░░░░░"
