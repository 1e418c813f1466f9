"""Fetching one large file: it goes on where it broke off, and what arrives damaged is fetched anew."""

import base64
import hashlib
import http.client
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TextIO
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPSHandler, Request, build_opener

from antiphon.cli.packages import Wheel
from antiphon.errors import AntiphonError

BAR_CELLS = 24
REDRAW_SECONDS = 0.1


class ProgressBar:
    """`update` is told the bytes that are done, and shows it as often as it helps."""

    def __init__(self, label: str, total: int, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._clock = clock
        self._live = stream.isatty()
        self._first: tuple[float, int] | None = None
        self._drawn_at = float("-inf")
        self._tenths = 0

    def update(self, done: int) -> None:
        now = self._clock()
        if self._first is None:
            # What an earlier attempt brought was not fetched now: it does not count for the speed, nor for the lines.
            self._first = (now, done)
            self._tenths = done * 10 // self._total
        if not self._live:
            self._write_tenths(done)
        elif now - self._drawn_at >= REDRAW_SECONDS or done == self._total:
            self._drawn_at = now
            self._draw(done, now)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._first is not None:
            self._stream.write("\n")
            self._stream.flush()

    def _write_tenths(self, done: int) -> None:
        tenths = done * 10 // self._total
        if tenths > self._tenths:
            self._tenths = tenths
            self._stream.write(f"{self._label}: {tenths * 10}% of {_megabytes(self._total)} MB\n")
            self._stream.flush()

    def _draw(self, done: int, now: float) -> None:
        cells = done * BAR_CELLS // self._total
        bar = "█" * cells + "░" * (BAR_CELLS - cells)
        share = f"{done * 100 // self._total:3}%"
        line = f"{self._label}  {bar} {share}  {_megabytes(done)}/{_megabytes(self._total)} MB{self._pace(done, now)}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r{line[:width]:{width}}")
        self._stream.flush()

    def _pace(self, done: int, now: float) -> str:
        assert self._first is not None
        started, first = self._first
        if done == first or now <= started:
            return ""
        speed = (done - first) / (now - started)
        minutes, seconds = divmod(int((self._total - done) / speed), 60)
        return f"  {_megabytes(speed)} MB/s  {minutes}:{seconds:02} left"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.1f}"


SILENCE_SECONDS = 60
CHUNK_BYTES = 1 << 16

Report = Callable[[int, int | None], None]
"""Told after each chunk: the bytes that are there, and how many it will be (None if the server does not say)."""


class _Broken(Exception):
    """The connection failed or ended early."""


def download(archive: Wheel, target: Path, *, report: Report) -> None:
    """Bring the whole archive to `target`. What an earlier attempt left there is continued."""
    for _ in range(2):
        _complete(archive, target, report)
        if archive.sha256 is None or digest(target) == archive.sha256:
            return
        target.unlink()
    raise AntiphonError(f"{_name(archive)} arrives damaged: its sha256 is not the {archive.sha256} its index promises.")


def digest(path: Path) -> str:
    """A file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _complete(archive: Wheel, target: Path, report: Report) -> None:
    while True:
        before = _size(target)
        try:
            _attempt(archive, target, report)
        except _Broken as error:
            # As long as each attempt brings the file further it goes on by itself; else the user decides when.
            if _size(target) <= before:
                raise AntiphonError(
                    f"The download of {_name(archive)} stopped after {_size(target)} bytes: {error}. "
                    "Run the same command again to continue."
                ) from None
        else:
            return


def _attempt(archive: Wheel, target: Path, report: Report) -> None:
    have = _size(target)
    try:
        with _open(archive, have) as reply:
            _receive(reply, target, have, report)
    except HTTPError as error:
        with error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
                raise AntiphonError(
                    f"{urlsplit(archive.url).hostname} does not hand out {_name(archive)}: "
                    f"it answers {error.code} {error.reason}."
                ) from None
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return
        target.unlink()
        _attempt(archive, target, report)
    except URLError as error:
        raise _Broken(str(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.filename is not None:  # the disk's fault, not the connection's
            raise
        raise _Broken(str(error) or type(error).__name__) from None


def _open(archive: Wheel, have: int) -> Any:
    parts = urlsplit(archive.url)
    request = Request(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])))
    if have:
        request.add_header("Range", f"bytes={have}-")
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        # Unredirected: a mirror that sends us on to another host does not send our password along.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
    context = ssl.create_default_context(cafile=archive.cert) if parts.scheme == "https" else None
    return build_opener(HTTPSHandler(context=context)).open(request, timeout=SILENCE_SECONDS)


def _receive(reply: Any, target: Path, have: int, report: Report) -> None:
    goes_on = reply.status == http.HTTPStatus.PARTIAL_CONTENT
    start = have if goes_on and reply.headers.get("Content-Range", "").startswith(f"bytes {have}-") else 0
    length = reply.headers.get("Content-Length")
    total = start + int(length) if length is not None else None
    with target.open("ab" if start else "wb") as file:
        there = _copy(reply, file, start=start, total=total, report=report)
    if total is not None and there < total:
        raise _Broken(f"the connection ended {total - there} bytes early")


def _copy(reply: Any, file: IO[bytes], *, start: int, total: int | None, report: Report) -> int:
    there = start
    while chunk := reply.read(CHUNK_BYTES):
        file.write(chunk)
        there += len(chunk)
        report(there, total)
    return there


def _size(target: Path) -> int:
    return target.stat().st_size if target.exists() else 0


def _name(archive: Wheel) -> str:
    return urlsplit(archive.url).path.rpartition("/")[2]
