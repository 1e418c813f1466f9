"""Download one large file with a progress bar. Interrupted downloads are continued, damaged ones repeated."""

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
from antiphon.text_table import cut_text, pad_text

BAR_CELLS = 24
REDRAW_SECONDS = 0.1
READ_TIMEOUT_SECONDS = 60
CHUNK_BYTES = 1 << 16

OnProgress = Callable[[int, int | None], None]
"""Called after each chunk with the number of bytes received so far and the total, or None if it is unknown."""


class ProgressBar:
    """Shows the progress of a download: a bar on a terminal, else a line for each tenth."""

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
        """Show that `done` bytes have been received."""
        now = self._clock()
        if self._first is None:
            # Bytes of an earlier attempt count neither for the speed nor for the lines.
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
            self._stream.write(f"{self._label}: {tenths * 10}% of {_format_megabytes(self._total)} MB\n")
            self._stream.flush()

    def _draw(self, done: int, now: float) -> None:
        cells = done * BAR_CELLS // self._total
        bar = "█" * cells + "░" * (BAR_CELLS - cells)
        percent = f"{done * 100 // self._total:3}%"
        size = f"{_format_megabytes(done)}/{_format_megabytes(self._total)} MB"
        line = f"{self._label}  {bar} {percent}  {size}{self._format_speed(done, now)}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r{pad_text(cut_text(line, width), width)}")
        self._stream.flush()

    def _format_speed(self, done: int, now: float) -> str:
        assert self._first is not None
        started, first = self._first
        if done == first or now <= started:
            return ""
        speed = (done - first) / (now - started)
        minutes, seconds = divmod(int((self._total - done) / speed), 60)
        return f"  {_format_megabytes(speed)} MB/s  {minutes}:{seconds:02} left"


def _format_megabytes(count: float) -> str:
    return f"{count / 1e6:.1f}"


def download(wheel: Wheel, target: Path, *, on_progress: OnProgress) -> None:
    """Download a wheel to `target`. A partial file there is continued."""
    for _ in range(2):
        _download_all(wheel, target, on_progress)
        if wheel.sha256 is None or compute_sha256(target) == wheel.sha256:
            return
        target.unlink()
    raise AntiphonError(
        f"The download of {_file_name(wheel)} is damaged: its sha256 is not {wheel.sha256}, which the index states."
    )


def compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _ConnectionLost(Exception):
    """The connection failed or ended early."""


def _download_all(wheel: Wheel, target: Path, on_progress: OnProgress) -> None:
    """Repeat attempts until the file is complete. An attempt that receives nothing is an error."""
    while True:
        before = _size(target)
        try:
            _download_rest(wheel, target, on_progress)
        except _ConnectionLost as error:
            if _size(target) <= before:
                raise AntiphonError(
                    f"The download of {_file_name(wheel)} stopped after {_size(target)} bytes: {error}. "
                    "Run the same command again to continue."
                ) from None
        else:
            return


def _download_rest(wheel: Wheel, target: Path, on_progress: OnProgress) -> None:
    have = _size(target)
    try:
        with _open(wheel, have) as reply:
            _receive(reply, target, have, on_progress)
    except HTTPError as error:
        with error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
                raise AntiphonError(
                    f"Cannot download {_file_name(wheel)} from {urlsplit(wheel.url).hostname}: "
                    f"the server returned {error.code} {error.reason}."
                ) from None
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return
        target.unlink()
        _download_rest(wheel, target, on_progress)
    except URLError as error:
        raise _ConnectionLost(str(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.filename is not None:  # an error of the disk, not of the connection
            raise
        raise _ConnectionLost(str(error) or type(error).__name__) from None


def _open(wheel: Wheel, have: int) -> Any:
    parts = urlsplit(wheel.url)
    request = Request(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])))
    if have:
        request.add_header("Range", f"bytes={have}-")
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        # Unredirected: the password is not sent to the host that a mirror redirects to.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
    context = ssl.create_default_context(cafile=wheel.cert) if parts.scheme == "https" else None
    return build_opener(HTTPSHandler(context=context)).open(request, timeout=READ_TIMEOUT_SECONDS)


def _receive(reply: Any, target: Path, have: int, on_progress: OnProgress) -> None:
    is_partial = reply.status == http.HTTPStatus.PARTIAL_CONTENT
    start = have if is_partial and reply.headers.get("Content-Range", "").startswith(f"bytes {have}-") else 0
    length = reply.headers.get("Content-Length")
    total = start + int(length) if length is not None else None
    with target.open("ab" if start else "wb") as file:
        received = _copy(reply, file, start=start, total=total, on_progress=on_progress)
    if total is not None and received < total:
        raise _ConnectionLost(f"the connection ended {total - received} bytes early")


def _copy(reply: Any, file: IO[bytes], *, start: int, total: int | None, on_progress: OnProgress) -> int:
    received = start
    while chunk := reply.read(CHUNK_BYTES):
        file.write(chunk)
        received += len(chunk)
        on_progress(received, total)
    return received


def _size(target: Path) -> int:
    return target.stat().st_size if target.exists() else 0


def _file_name(wheel: Wheel) -> str:
    return urlsplit(wheel.url).path.rpartition("/")[2]
