"""Check JSON against a TypedDict, such as the parameters of the official SDKs. Unknown keys are errors."""

import collections.abc
import types
import typing
from typing import Any, Literal, Required, Union, get_args, get_origin

import typing_extensions

_REQUIRED = (Required, typing_extensions.Required)
_ARRAYS = (list, collections.abc.Iterable, collections.abc.Sequence)


def find_type_errors(value: Any, kind: Any, path: str = "$") -> list[str]:
    """Return the errors of a value with their paths. The list is empty if the value matches the type."""
    origin = get_origin(kind)
    if kind is Any or kind is object:
        return []
    if typing_extensions.is_typeddict(kind):
        return _check_typed_dict(value, kind, path)
    if origin in (Union, types.UnionType):
        return _check_union(value, kind, path)
    if origin is Literal:
        return [] if value in get_args(kind) else [f"{path}: {value!r} is not one of {get_args(kind)}"]
    if origin in _REQUIRED:
        return find_type_errors(value, get_args(kind)[0], path)
    if origin in _ARRAYS or getattr(origin, "__name__", "") == "SequenceNotStr":
        return _check_list(value, get_args(kind)[0], path)
    if origin in (dict, collections.abc.Mapping):
        return [] if isinstance(value, dict) else [f"{path}: {value!r} is no object"]
    if kind is float:
        kind = int | float
    if kind in (None, type(None)):
        return [] if value is None else [f"{path}: {value!r} is not null"]
    return [] if isinstance(value, kind) else [f"{path}: {value!r} is no {kind}"]


def _check_typed_dict(value: Any, kind: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is no object"]
    hints = typing.get_type_hints(kind, include_extras=True)
    errors = [f"{path}.{name}: unknown key" for name in value if name not in hints]
    errors += [f"{path}.{name}: missing" for name in kind.__required_keys__ if name not in value]
    for name in value:
        if name in hints:
            errors += find_type_errors(value[name], hints[name], f"{path}.{name}")
    return errors


def _check_union(value: Any, kind: Any, path: str) -> list[str]:
    tried = [find_type_errors(value, member, path) for member in get_args(kind)]
    return min(tried, key=len)


def _check_list(value: Any, kind: Any, path: str) -> list[str]:
    if not isinstance(value, list):
        return [f"{path}: {value!r} is no array"]
    return [error for index, each in enumerate(value) for error in find_type_errors(each, kind, f"{path}[{index}]")]
