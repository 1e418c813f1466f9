import json
from typing import Any

import pytest
from msgspec import inspect

from antiphon.protocol.codec import Decoded, decode_request, encode
from antiphon.protocol.items import Message
from antiphon.protocol.request import (
    ConversationRef,
    CreateRequest,
    JsonSchemaFormat,
    ReasoningConfig,
    TextConfig,
    TextFormat,
)


@pytest.mark.parametrize(
    ("raw", "request_"),
    [
        (b"{}", CreateRequest()),
        (b'{"input":"hi"}', CreateRequest(input="hi")),
        (b'{"input":""}', CreateRequest(input="")),
        (b'{"input":[]}', CreateRequest(input=[])),
        (b'{"input":[{"role":"user","content":"hi"}]}', CreateRequest(input=[Message("user", "hi")])),
        (b'{"conversation":"conv_1"}', CreateRequest(conversation="conv_1")),
        (b'{"conversation":{"id":"conv_1"}}', CreateRequest(conversation=ConversationRef("conv_1"))),
        (b'{"reasoning":{"summary":true}}', CreateRequest(reasoning=ReasoningConfig(summary="auto"))),
        (b'{"reasoning":{"summary":false}}', CreateRequest(reasoning=ReasoningConfig())),
        (b'{"reasoning":{}}', CreateRequest(reasoning=ReasoningConfig())),
        (b'{"temperature":1}', CreateRequest(temperature=1.0)),
        (b'{"text":{"format":{"type":"text"}}}', CreateRequest(text=TextConfig(TextFormat()))),
        (
            b'{"text":{"format":{"type":"json_schema","name":"n","schema":{},"strict":true}}}',
            CreateRequest(text=TextConfig(JsonSchemaFormat("n", schema={}, strict=True))),
        ),
        (
            b'{"type":"response.create","generate":false,"stream_id":"s"}',
            CreateRequest(type="response.create", generate=False, stream_id="s"),
        ),
        (b'{"client_metadata":{"a":["b"]}}', CreateRequest(client_metadata={"a": ["b"]})),
    ],
)
def test_request_is_decoded(raw: bytes, request_: CreateRequest) -> None:
    assert decode_request(raw) == Decoded(request_)


def optional_fields(struct: type, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all optional fields of a struct and of its nested structs."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    found = [(*path, field.encode_name) for field in info.fields if not field.required]
    for field in info.fields:
        types = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        for node in types:
            if (
                isinstance(node, inspect.StructType)
                and node.tag_field is None
                and not any(f.required for f in node.fields)
            ):
                found += optional_fields(node.cls, (*path, field.encode_name))
    return found


@pytest.mark.parametrize("path", optional_fields(CreateRequest), ids=".".join)
def test_null_equals_omitted_optional_field(path: tuple[str, ...]) -> None:
    *parents, name = path
    body: Any = {name: None}
    empty: Any = {}
    for parent in reversed(parents):
        body, empty = {parent: body}, {parent: empty}
    assert decode_request(json.dumps(body).encode()) == decode_request(json.dumps(empty).encode())


def test_request_with_only_nulls_is_empty() -> None:
    body = dict.fromkeys(CreateRequest.__struct_encode_fields__)
    assert decode_request(json.dumps(body).encode()) == Decoded(CreateRequest())
    assert encode(CreateRequest()) == b"{}"


def test_request_is_encoded_without_unset_fields() -> None:
    request = CreateRequest(model="m", input=[Message("user", "hi")], tools=[], reasoning=ReasoningConfig(effort="low"))
    assert json.loads(encode(request)) == {
        "model": "m",
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "tools": [],
        "reasoning": {"effort": "low", "summary": None},
    }
