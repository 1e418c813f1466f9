"""Hypothesis strategies for all structs of the protocol, generated from their definitions."""

import functools
import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import inspect

from antiphon.protocol import request, response
from antiphon.protocol.codec import EVENTS, encode
from antiphon.protocol.content import ANNOTATIONS, PARTS
from antiphon.protocol.items import ITEMS
from antiphon.protocol.tools import CHOICE_WORDS, CHOICES
from antiphon.protocol.unions import OpenUnion, UnionField, Unknown, find_union_field

_texts = st.text(max_size=8)
_integers = st.integers(-(2**63), 2**63 - 1)
_floats = st.floats(allow_nan=False, allow_infinity=False)
_space = st.sampled_from(["", "", " ", "\n\t", "\r\n  "])


def json_values() -> SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | _integers | _floats | _texts
    return st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | _objects(inner), max_leaves=4)


def _objects(inner: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
    return st.dictionaries(_texts, inner, max_size=2)


# Valid JSON that an encoder would write differently.
_odd_scalars = st.sampled_from(
    ["null", "true", "-0", "1.0", "1E5", "10e-2", "1" * 40, r'"\u0041"', r'"\/"', '"é"', r'"\ud83d\ude00"', '""']
)


@st.composite
def _spelled_array(draw: st.DrawFn, inner: SearchStrategy[str]) -> str:
    return "[" + ",".join(draw(_space) + draw(inner) + draw(_space) for _ in range(draw(st.integers(0, 2)))) + "]"


@st.composite
def _spelled_object(draw: st.DrawFn, inner: SearchStrategy[str], fields: dict[str, str] | None = None) -> str:
    extra = draw(st.dictionaries(st.sampled_from(["status", "acme", "x y", "z"]), inner, max_size=2))
    pairs = draw(st.permutations(sorted({**extra, **(fields or {})}.items())))
    spelled = (draw(_space) + json.dumps(name) + draw(_space) + ":" + draw(_space) + value for name, value in pairs)
    return "{" + ",".join(pair + draw(_space) for pair in spelled) + "}"


_spelled = st.recursive(
    _odd_scalars | _texts.map(json.dumps), lambda inner: _spelled_array(inner) | _spelled_object(inner), max_leaves=4
)


@st.composite
def unknowns(draw: st.DrawFn) -> Unknown:
    """Return an object of an unknown type, in an unusual but valid spelling."""
    kind = draw(st.sampled_from(['"acme:thing"', '"acme:search_call"', r'"fut\u0075re"', '"response.acme:done"', '""']))
    fields = {"type": kind} | draw(st.sampled_from([{}, {"id": '"x_1"'}, {"id": "7"}, {"role": '"user"'}]))
    return Unknown(draw(_spelled_object(_spelled, fields)).encode())


def members(union: OpenUnion[Any]) -> SearchStrategy[Any]:
    """Generate members of a union, including unknown objects."""
    return st.deferred(lambda: st.one_of(unknowns(), *(instances(member) for member in union.members.values())))


@functools.cache
def instances(struct: type) -> SearchStrategy[Any]:
    """Generate values of a struct, with any of its optional fields set."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    required = {field.name: _values(field.type) for field in info.fields if field.required}
    optional = {field.name: _values(field.type) for field in info.fields if not field.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: struct(**fields))


def _union_values(field: UnionField) -> SearchStrategy[Any]:
    any_member = members(field.get_union())
    forms: list[SearchStrategy[Any]] = [st.lists(any_member, max_size=2) if field.many else any_member]
    forms += [_texts] * field.text + [st.sampled_from(field.words)] * bool(field.words)
    forms += [st.none()] * (field.nullable and not field.null_is_default)
    return st.one_of(forms)


@functools.singledispatch
def _values(node: inspect.Type) -> SearchStrategy[Any]:
    raise NotImplementedError(f"no strategy for {node}")


@_values.register
def _(node: inspect.Metadata) -> SearchStrategy[Any]:
    field = find_union_field(node)
    return _values(node.type) if field is None else _union_values(field)


@_values.register
def _(node: inspect.AnyType) -> SearchStrategy[Any]:
    return json_values()


@_values.register
def _(node: inspect.NoneType) -> SearchStrategy[Any]:
    return st.none()


@_values.register
def _(node: inspect.BoolType) -> SearchStrategy[Any]:
    return st.booleans()


@_values.register
def _(node: inspect.IntType) -> SearchStrategy[Any]:
    return st.integers(-(2**63) if node.ge is None else node.ge, 2**63 - 1 if node.le is None else node.le)


@_values.register
def _(node: inspect.FloatType) -> SearchStrategy[Any]:
    return st.floats(node.ge, node.le, allow_nan=False, allow_infinity=False)


@_values.register
def _(node: inspect.StrType) -> SearchStrategy[Any]:
    if node.pattern is not None:
        return st.from_regex(node.pattern, fullmatch=True)
    return st.text(min_size=node.min_length or 0, max_size=min(8, node.max_length or 8))


@_values.register
def _(node: inspect.LiteralType) -> SearchStrategy[Any]:
    return st.sampled_from(node.values)


@_values.register
def _(node: inspect.ListType) -> SearchStrategy[Any]:
    return st.lists(_values(node.item_type), min_size=node.min_length or 0, max_size=max(2, node.min_length or 0))


@_values.register
def _(node: inspect.DictType) -> SearchStrategy[Any]:
    return st.dictionaries(_values(node.key_type), _values(node.value_type), max_size=2)


@_values.register
def _(node: inspect.UnionType) -> SearchStrategy[Any]:
    return st.one_of([_values(member) for member in node.types])


@_values.register
def _(node: inspect.StructType) -> SearchStrategy[Any]:
    return instances(node.cls)


def parts() -> SearchStrategy[Any]:
    return members(PARTS)


def annotations() -> SearchStrategy[Any]:
    return members(ANNOTATIONS)


def all_items() -> SearchStrategy[Any]:
    return members(ITEMS)


def choices() -> SearchStrategy[Any]:
    return members(CHOICES) | st.sampled_from(CHOICE_WORDS)


def all_events() -> SearchStrategy[Any]:
    return members(EVENTS)


def requests() -> SearchStrategy[request.CreateRequest]:
    return instances(request.CreateRequest)


def responses() -> SearchStrategy[response.Response]:
    return instances(response.Response)


def _find_entries(value: Any) -> list[tuple[Any, Any]]:
    """Return each container in a JSON value with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [entry for key in keys for entry in [(value, key), *_find_entries(value[key])]]


@st.composite
def damaged(draw: st.DrawFn, structs: SearchStrategy[Any]) -> Any:
    """Return the JSON value of a struct with one to three values replaced, added or deleted."""
    value = json.loads(encode(draw(structs)))
    for _ in range(draw(st.integers(1, 3))):
        if found := _find_entries(value):
            container, key = draw(st.sampled_from(found))
            damage = draw(st.sampled_from(["replace", "add", "delete"]))
            if damage == "replace":
                container[key] = draw(json_values())
            elif damage == "add" and isinstance(container, dict):
                container[draw(st.sampled_from(["acme", "x y", "type", "a` - at `$.input[0]"]))] = 1
            else:
                del container[key]
    return value
