"""The messages between this process and the worker that compiles grammars on trial."""

import msgspec


class Vocabulary(msgspec.Struct):
    """The tokens of a model. Special tokens start with the byte 255."""

    tokens: list[bytes]
    end: int


class Setup(msgspec.Struct, kw_only=True):
    """The first message to the worker.

    With a `vocabulary`, grammars are compiled by the library of the embedded model, if possible.
    """

    megabytes: int
    vocabulary: Vocabulary | None = None


class Ready(msgspec.Struct):
    """The reply to a `Setup`. `is_native`: the library of the embedded model is used."""

    is_native: bool


class Job(msgspec.Struct):
    syntax: str
    definition: str
    seconds: float


class TrialResult(msgspec.Struct):
    """The reply to a `Job`: the fault of the grammar or None, and True if the process ends now."""

    fault: str | None
    is_last: bool = False
