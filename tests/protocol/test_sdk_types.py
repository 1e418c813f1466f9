"""Our structs support every field and every value of the official SDK's types."""

import types
from collections.abc import Iterator
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import pytest
from msgspec import inspect
from openai.types import responses as sdk
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel

from antiphon.protocol.codec import EVENTS
from antiphon.protocol.content import PARTS
from antiphon.protocol.items import ITEMS
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import ErrorCode, IncompleteReason, Response, Status
from antiphon.protocol.tools import TOOLS
from antiphon.protocol.unions import OpenUnion, UnionField, find_union_field

# Intended differences, with the reason.
INTENDED = {
    # The SDK raises for an error event only if the fields are nested in `error`, which its own type does not have.
    "Error.code: missing",
    "Error.message: missing",
    "Error.param: missing",
    # Open Responses requires a reason.
    "IncompleteDetails.reason: required",
    "IncompleteDetails.reason: no <class 'NoneType'>",
    # An empty list means none.
    "LogProb.top_logprobs: no <class 'NoneType'>",
    # The other forms of the same type require both.
    "TopLogProb.token: required",
    "TopLogProb.token: no <class 'NoneType'>",
    "TopLogProb.logprob: required",
    "TopLogProb.logprob: no <class 'NoneType'>",
    # Open Responses: never null.
    "Response.background: no <class 'NoneType'>",
    "Response.service_tier: no <class 'NoneType'>",
    "Response.status: no <class 'NoneType'>",
    "Response.temperature: no <class 'NoneType'>",
    "Response.text: no <class 'NoneType'>",
    "Response.top_logprobs: no <class 'NoneType'>",
    "Response.top_p: no <class 'NoneType'>",
    "Response.truncation: no <class 'NoneType'>",
}


def alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union, without wrappers such as Required."""
    while hasattr(annotation, "__metadata__") or get_origin(annotation) in (Required, NotRequired):
        annotation = get_args(annotation)[0]
    if hasattr(annotation, "__value__"):
        return alternatives(annotation.__value__)
    if get_origin(annotation) in (Union, types.UnionType):
        return [found for member in get_args(annotation) for found in alternatives(member)]
    return [annotation]


def is_typed_dictionary(annotation: Any) -> bool:
    return hasattr(annotation, "__required_keys__")


def is_object(annotation: Any) -> bool:
    return is_typed_dictionary(annotation) or (isinstance(annotation, type) and issubclass(annotation, BaseModel))


def object_fields(annotation: Any) -> dict[str, tuple[Any, bool]]:
    """Return the fields of a model or typed dictionary: JSON name, type, and True if it is optional."""
    if is_typed_dictionary(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        return {name: (hint, get_origin(hint) is not Required) for name, hint in hints.items()}
    fields = annotation.model_fields
    return {field.alias or name: (field.annotation, not field.is_required()) for name, field in fields.items()}


def tags(annotation: Any) -> list[str]:
    if "type" not in object_fields(annotation):
        return []
    kinds = alternatives(object_fields(annotation)["type"][0])
    return [tag for kind in kinds if get_origin(kind) is Literal for tag in get_args(kind)]


def nodes(node: Any) -> list[Any]:
    return list(node.types) if isinstance(node, inspect.UnionType) else [node]


def gaps(annotation: Any, node: Any, path: str) -> Iterator[str]:
    """Yield the values that the SDK's type allows and ours does not."""
    for member in alternatives(annotation):
        yield from member_gaps(member, node, path)


def member_gaps(member: Any, node: Any, path: str) -> Iterator[str]:
    ours = nodes(node)
    if any(isinstance(our, inspect.AnyType) for our in ours):
        return
    if isinstance(node, UnionField):
        yield from open_gaps(member, node, path)
    elif is_object(member):
        yield from object_gaps(member, ours, path)
    elif get_origin(member) is Literal:
        accepted = [value for our in ours if isinstance(our, inspect.LiteralType) for value in our.values]
        if not any(isinstance(our, inspect.StrType) for our in ours):
            yield from (f"{path}: not {value!r}" for value in get_args(member) if value not in accepted)
    elif get_origin(member) is not None and not is_mapping(member):
        inner = [our.item_type for our in ours if isinstance(our, inspect.ListType)]
        yield from gaps(get_args(member)[0], inner[0], f"{path}[]") if inner else [f"{path}: no list"]
    elif not any(isinstance(our, SCALARS[get_origin(member) or member]) for our in ours):
        yield f"{path}: no {member}"


SCALARS: dict[Any, Any] = {
    str: inspect.StrType,
    bool: inspect.BoolType,
    int: (inspect.IntType, inspect.FloatType),
    float: inspect.FloatType,
    type(None): inspect.NoneType,
    dict: inspect.DictType,
    object: inspect.DictType,
}


def is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict


def open_gaps(member: Any, node: UnionField, path: str) -> Iterator[str]:
    if is_object(member):
        yield from () if node.many else union_gaps(member, node.get_union(), path)
    elif get_origin(member) is Literal:
        yield from (f"{path}: not {word!r}" for word in get_args(member) if word not in node.words)
    elif member is str or member is type(None):
        if not (node.text if member is str else node.nullable):
            yield f"{path}: no {member}"
    elif not node.many:
        yield f"{path}: no list"
    else:
        for element in alternatives(get_args(member)[0]):
            yield from union_gaps(element, node.get_union(), f"{path}[]")


def union_gaps(member: Any, union: OpenUnion[Any], path: str) -> Iterator[str]:
    for tag in tags(member):
        if tag in union.members:
            yield from struct_gaps(member, union.members[tag])
        else:
            yield f"{path}: no {tag}"


def object_gaps(member: Any, ours: list[Any], path: str) -> Iterator[str]:
    if any(isinstance(our, inspect.DictType) for our in ours):
        return
    structs = [our.cls for our in ours if isinstance(our, inspect.StructType)]
    tagged = [struct for struct in structs if struct.__struct_config__.tag in tags(member)]
    if not structs:
        yield f"{path}: no {member.__name__}"
    else:
        yield from struct_gaps(member, (tagged or structs)[0])


def struct_gaps(member: Any, struct: type) -> Iterator[str]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    ours = {field.encode_name: field for field in info.fields}
    for name, (annotation, optional) in object_fields(member).items():
        if name in ours:
            yield from field_gaps(annotation, struct, ours[name])
            if optional and ours[name].required:
                yield f"{struct.__name__}.{name}: required"
        elif name != info.tag_field:
            yield f"{struct.__name__}.{name}: missing"


def field_gaps(annotation: Any, struct: type, field: inspect.Field) -> Iterator[str]:
    return gaps(annotation, find_union_field(field.type) or field.type, f"{struct.__name__}.{field.encode_name}")


UNIONS = {
    "input items": (sdk.ResponseInputItem, ITEMS),
    "output items": (sdk.ResponseOutputItem, ITEMS),
    "stored items": (sdk.ResponseItem, ITEMS),
    "tools": (sdk.Tool, TOOLS),
    "events": (sdk.ResponseStreamEvent, EVENTS),
    "input parts": (sdk.ResponseInputContent, PARTS),
}


@pytest.mark.parametrize("name", UNIONS)
def test_every_sdk_union_member_is_supported(name: str) -> None:
    sdk_union, union = UNIONS[name]
    found = {gap for member in alternatives(sdk_union) for gap in union_gaps(member, union, name)}
    assert found - INTENDED == set()


def test_every_sdk_response_field_is_supported() -> None:
    assert set(struct_gaps(sdk.Response, Response)) - INTENDED == set()


def test_every_sdk_status_reason_and_code_is_supported() -> None:
    reason = object_fields(object_fields(sdk.Response)["incomplete_details"][0].__args__[0])["reason"][0]
    code = object_fields(sdk.ResponseError)["code"][0]
    words = [set(get_args(alternatives(union)[0])) for union in (sdk.ResponseStatus, reason, code)]
    assert words == [set(get_args(Status)), set(get_args(IncompleteReason)), set(get_args(ErrorCode))]


def test_every_sdk_parameter_is_supported() -> None:
    assert set(struct_gaps(ResponseCreateParamsBase, CreateRequest)) - INTENDED == set()
