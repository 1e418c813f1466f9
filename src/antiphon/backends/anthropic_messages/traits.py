"""The differences between Claude models, looked up by model name: the line, such as opus, and the version."""

import re
from typing import Literal

import msgspec

Thinking = Literal["none", "budget", "adaptive"]
Off = Literal["omit", "disabled", "between_tools", "never"]


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The traits of one generation of models.

    `thinking`: how thinking is requested: not at all, with a token budget, or adaptive with one of the `efforts`.
    `off`: how thinking is disabled. `forced`: thinking is allowed if a tool call is forced. `sampling`: the model takes
    `temperature` and `top_p`. `answer`: default limit of an answer in tokens. `longest`: the highest limit.
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

# Traits by the first version that has them. `_OFF` has the exceptions for single lines.
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

# For models of other vendors.
_OTHER_VENDORS = Traits(thinking="budget", longest=1_000_000)

_NAME = re.compile(r"claude-(?:([a-z]+)-)?(?:(\d{1,2})(?:[-.](\d{1,2}))?(?!\d))?", re.ASCII)


def find_traits(model: str) -> Traits:
    """Return the traits of a model. Models newer than the table get the traits of its last entry."""
    found = _NAME.search(model.lower())
    if found is None:
        return _OTHER_VENDORS
    line, major, minor = found.groups()
    if major is None:
        return _CANNOT_STOP
    version = (int(major), int(minor or 0))
    traits = next(traits for since, traits in reversed(_GENERATIONS) if since <= version)
    return msgspec.structs.replace(traits, off=_find_off(line or "", version, traits.off))


def _find_off(line: str, version: tuple[int, int], default: Off) -> Off:
    since = [known for name, known in _OFF if name == line and known <= version]
    return _OFF[line, max(since)] if since else default
