"""What differs from model to model, as data. A model is known by its name: its line, such as opus, and its version."""

import re
from typing import Literal

import msgspec

Thinking = Literal["none", "budget", "adaptive"]
Off = Literal["omit", "disabled", "between_tools", "never"]


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of models.

    `thinking` is how it is asked to think: not at all, with a budget of tokens, or as it sees fit with an effort, one
    of `efforts`. `off` is how it is asked not to. `forced` says that it may think although it is forced to call a
    tool, `sampling` that it takes a temperature. `answer` is how long an answer may get when nobody says, `longest`
    how long one can be.
    """

    thinking: Thinking = "none"
    off: Off = "omit"
    efforts: tuple[str, ...] = ()
    forced: bool = False
    sampling: bool = True
    json_schema: bool = False
    answer: int = 8192
    longest: int = 8192


_EFFORTS = ("low", "medium", "high", "max")
_ALL_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_LATEST = Traits(
    thinking="adaptive",
    off="disabled",
    efforts=_ALL_EFFORTS,
    forced=True,
    sampling=False,
    json_schema=True,
    answer=32_000,
    longest=128_000,
)
_CANNOT_STOP = msgspec.structs.replace(_LATEST, off="never")

# From this version on. Models of one version differ in little: that is in `_OFF`.
_GENERATIONS: tuple[tuple[tuple[int, int], Traits], ...] = (
    ((0, 0), Traits(answer=4096, longest=4096)),
    ((3, 5), Traits()),
    ((3, 7), Traits(thinking="budget", answer=16_000, longest=32_000)),
    ((4, 5), Traits(thinking="budget", json_schema=True, answer=32_000, longest=64_000)),
    (
        (4, 6),
        Traits(thinking="adaptive", efforts=_EFFORTS, json_schema=True, answer=32_000, longest=64_000),
    ),
    ((4, 7), msgspec.structs.replace(_LATEST, off="omit", forced=False)),
    ((4, 8), msgspec.structs.replace(_LATEST, off="omit")),
    ((5, 0), _LATEST),
    ((5, 5), _CANNOT_STOP),
)
_OFF: dict[tuple[str, tuple[int, int]], Off] = {
    ("sonnet", (5, 5)): "between_tools",
    ("haiku", (5, 5)): "disabled",
    ("fable", (5, 0)): "never",
    ("mythos", (5, 0)): "never",
}

# What other servers with this API understand, whatever their models are.
_OTHERS = Traits(thinking="budget", longest=1_000_000)

_NAME = re.compile(r"claude-(?:([a-z]+)-)?(?:(\d{1,2})(?:[-.](\d{1,2}))?(?!\d))?", re.ASCII)


def find_traits(model: str) -> Traits:
    """The traits of a model. One that is newer than this table is taken for the newest in it."""
    found = _NAME.search(model.lower())
    if found is None:
        return _OTHERS
    line, major, minor = found.groups()
    if major is None:
        return _CANNOT_STOP
    version = (int(major), int(minor or 0))
    traits = next(traits for since, traits in reversed(_GENERATIONS) if since <= version)
    return msgspec.structs.replace(traits, off=_find_off(line or "", version, traits.off))


def _find_off(line: str, version: tuple[int, int], usual: Off) -> Off:
    since = [known for name, known in _OFF if name == line and known <= version]
    return _OFF[line, max(since)] if since else usual
