"""Whether JSON is of a TypedDict, such as the parameters of the official SDKs, and of nothing else: no key too many."""

import collections.abc
import types
import typing
from typing import Any, Literal, Required, Union, get_args, get_origin

import typing_extensions

_REQUIRED = (Required, typing_extensions.Required)
_MANY = (list, collections.abc.Iterable, collections.abc.Sequence)


def find_faults(value: Any, kind: Any, place: str = "$") -> list[str]:
    """What is wrong with the value, and where; nothing if it is of this kind."""
    origin = get_origin(kind)
    if kind is Any or kind is object:
        return []
    if typing_extensions.is_typeddict(kind):
        return _check_typed_dict(value, kind, place)
    if origin in (Union, types.UnionType):
        return _check_union(value, kind, place)
    if origin is Literal:
        return [] if value in get_args(kind) else [f"{place}: {value!r} is none of {get_args(kind)}"]
    if origin in _REQUIRED:
        return find_faults(value, get_args(kind)[0], place)
    if origin in _MANY or getattr(origin, "__name__", "") == "SequenceNotStr":
        return _check_list(value, get_args(kind)[0], place)
    if origin in (dict, collections.abc.Mapping):
        return [] if isinstance(value, dict) else [f"{place}: {value!r} is no object"]
    if kind is float:
        kind = int | float
    if kind in (None, type(None)):
        return [] if value is None else [f"{place}: {value!r} is not null"]
    return [] if isinstance(value, kind) else [f"{place}: {value!r} is no {kind}"]


def _check_typed_dict(value: Any, kind: Any, place: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{place}: {value!r} is no object"]
    hints = typing.get_type_hints(kind, include_extras=True)
    faults = [f"{place}.{name}: not known" for name in value if name not in hints]
    faults += [f"{place}.{name}: missing" for name in kind.__required_keys__ if name not in value]
    for name in value:
        if name in hints:
            faults += find_faults(value[name], hints[name], f"{place}.{name}")
    return faults


def _check_union(value: Any, kind: Any, place: str) -> list[str]:
    tried = [find_faults(value, member, place) for member in get_args(kind)]
    return min(tried, key=len)


def _check_list(value: Any, kind: Any, place: str) -> list[str]:
    if not isinstance(value, list):
        return [f"{place}: {value!r} is no array"]
    return [fault for index, each in enumerate(value) for fault in find_faults(each, kind, f"{place}[{index}]")]
