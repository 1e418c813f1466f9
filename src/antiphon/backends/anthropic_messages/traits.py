"""The differences between Claude models, looked up by model name: the line, such as opus, and the version."""

import re
from typing import Literal

import msgspec

ThinkingMode = Literal["none", "budget", "adaptive"]
ThinkingOff = Literal["omit", "disabled", "between_tools", "never"]


class ModelTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The traits of one generation of models.

    `thinking`: how thinking is requested: not at all, with a token budget, or adaptive with one of the `efforts`.
    `thinking_off`: how it is disabled. `takes_sampling`: the model accepts `temperature` and `top_p`.
    `default_max_tokens`: the limit of an answer if the request has none. `highest_max_tokens`: the model's own limit.
    """

    thinking: ThinkingMode = "none"
    thinking_off: ThinkingOff = "omit"
    efforts: tuple[str, ...] = ()
    can_think_if_forced: bool = False
    takes_sampling: bool = True
    json_schema: bool = False
    default_max_tokens: int = 8192
    highest_max_tokens: int = 8192


_EFFORTS = ("low", "medium", "high", "max")
_ALL_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_LATEST = ModelTraits(
    thinking="adaptive",
    thinking_off="disabled",
    efforts=_ALL_EFFORTS,
    can_think_if_forced=True,
    takes_sampling=False,
    json_schema=True,
    default_max_tokens=32_000,
    highest_max_tokens=128_000,
)
_CANNOT_STOP = msgspec.structs.replace(_LATEST, thinking_off="never")

# Traits by the first version that has them. `_OFF` has the exceptions for single lines.
_GENERATIONS: tuple[tuple[tuple[int, int], ModelTraits], ...] = (
    ((0, 0), ModelTraits(default_max_tokens=4096, highest_max_tokens=4096)),
    ((3, 5), ModelTraits()),
    ((3, 7), ModelTraits(thinking="budget", default_max_tokens=16_000, highest_max_tokens=32_000)),
    ((4, 5), ModelTraits(thinking="budget", json_schema=True, default_max_tokens=32_000, highest_max_tokens=64_000)),
    (
        (4, 6),
        ModelTraits(
            thinking="adaptive",
            efforts=_EFFORTS,
            json_schema=True,
            default_max_tokens=32_000,
            highest_max_tokens=64_000,
        ),
    ),
    ((4, 7), msgspec.structs.replace(_LATEST, thinking_off="omit", can_think_if_forced=False)),
    ((4, 8), msgspec.structs.replace(_LATEST, thinking_off="omit")),
    ((5, 0), _LATEST),
    ((5, 5), _CANNOT_STOP),
)
_OFF: dict[tuple[str, tuple[int, int]], ThinkingOff] = {
    ("sonnet", (5, 5)): "between_tools",
    ("haiku", (5, 5)): "disabled",
    ("fable", (5, 0)): "never",
    ("mythos", (5, 0)): "never",
}

# For models of other vendors.
_OTHER_VENDORS = ModelTraits(thinking="budget", highest_max_tokens=1_000_000)

_NAME = re.compile(r"claude-(?:([a-z]+)-)?(?:(\d{1,2})(?:[-.](\d{1,2}))?(?!\d))?", re.ASCII)


def find_traits(model: str) -> ModelTraits:
    """Return the traits of a model. Models newer than the table get the traits of its last entry."""
    found = _NAME.search(model.lower())
    if found is None:
        return _OTHER_VENDORS
    line, major, minor = found.groups()
    if major is None:
        return _CANNOT_STOP
    version = (int(major), int(minor or 0))
    traits = next(traits for since, traits in reversed(_GENERATIONS) if since <= version)
    return msgspec.structs.replace(traits, thinking_off=_find_off(line or "", version, traits.thinking_off))


def _find_off(line: str, version: tuple[int, int], default: ThinkingOff) -> ThinkingOff:
    since = [known for name, known in _OFF if name == line and known <= version]
    return _OFF[line, max(since)] if since else default
