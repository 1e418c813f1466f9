"""The allowed values of a field, found in the types of the API: msgspec's errors do not name them."""

import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Raw, Struct

from antiphon.protocol.unions import OpenUnion, UnionField

_ELEMENTS: "msgspec.json.Decoder[list[Raw]]" = msgspec.json.Decoder(list[Raw])
_FIELDS: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])


def find_choices(kind: Any, body: bytes, steps: Sequence[str | int]) -> tuple[str, ...]:
    """Return the strings that the field at `steps` may have in a body of this type. None if it may have others."""
    kinds, raw = list(_expand(kind)), Raw(body)
    try:
        for step in steps:
            if isinstance(step, int):
                kinds = list(_list_element_types(kinds))
                raw = _ELEMENTS.decode(raw)[step]
            else:
                fields = _FIELDS.decode(raw)
                kinds = list(_list_field_types(_select_structs(kinds, raw, fields), step))
                raw = fields.get(step, Raw(b"null"))
    except (LookupError, msgspec.DecodeError):
        return ()
    found = (choice for each in kinds for choice in _list_strings(each))
    return tuple(dict.fromkeys(found))


def _expand(kind: Any) -> Iterator[Any]:
    """Yield the parts of a type: structs, lists, literals, and declarations of open unions."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *metadata = get_args(kind)
        declared = next((each.extra["union_field"] for each in metadata if _declares_union(each)), None)
        yield from _expand(inner) if declared is None else (declared,)
    elif origin in (Union, types.UnionType):
        for part in get_args(kind):
            yield from _expand(part)
    else:
        yield kind


def _declares_union(metadata: Any) -> bool:
    return isinstance(metadata, Meta) and "union_field" in (metadata.extra or {})


def _list_element_types(kinds: Iterable[Any]) -> Iterator[Any]:
    for kind in kinds:
        if isinstance(kind, UnionField):
            if kind.many:
                yield kind.get_union()
        elif get_origin(kind) is list:
            yield from _expand(get_args(kind)[0])


def _select_structs(kinds: Iterable[Any], raw: Raw, fields: dict[str, Raw]) -> list[type[Struct]]:
    """Return the structs that an object may be decoded as. Its tag selects one of several."""
    structs: list[Any] = []
    for kind in kinds:
        union = kind.get_union() if isinstance(kind, UnionField) and not kind.many else kind
        if isinstance(union, OpenUnion):
            structs.append(union.find_form(raw))
        elif isinstance(kind, type) and issubclass(kind, Struct):
            structs.append(kind)
    tag = msgspec.json.decode(fields["type"]) if "type" in fields else None
    found = [each for each in structs if each is not None]
    return [each for each in found if each.__struct_config__.tag == tag and tag is not None] or found


def _list_field_types(structs: Iterable[type[Struct]], name: str) -> Iterator[Any]:
    for struct in structs:
        if struct.__struct_config__.tag is not None and struct.__struct_config__.tag_field == name:
            yield Literal[struct.__struct_config__.tag]
        kind = _get_field_types(struct).get(name)
        if kind is not None:
            yield from _expand(kind)


@functools.cache
def _get_field_types(struct: type[Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def _list_strings(kind: Any) -> Sequence[str]:
    if isinstance(kind, UnionField):
        return kind.words
    return [each for each in get_args(kind) if isinstance(each, str)] if get_origin(kind) is Literal else ()
