"""Request bodies of conversations and of token counting."""

from typing import Any

import msgspec
import pytest

from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.codec import Decoded
from antiphon.protocol.conversation import AddItems, Conversation, CreateConversation, UpdateConversation
from antiphon.protocol.items import Message
from antiphon.protocol.request import ConversationRef, CountRequest
from antiphon.protocol.tools import FunctionChoice
from antiphon.protocol.unions import Unknown

MESSAGE = {"role": "user", "content": "hi"}
STRANGE = b'{"type":"acme:thing","x":1}'


@pytest.mark.parametrize("body", [b"", b"{}", b'{"items":null,"metadata":null}'])
def test_empty_body_creates_conversation(body: bytes) -> None:
    assert codec.decode_create_conversation(body) == Decoded(CreateConversation(), ())


def test_conversation_accepts_any_items_and_reports_unknown_fields() -> None:
    body = b'{"items":[{"role":"user","content":"hi","foo":1},' + STRANGE + b'],"metadata":{"a":"b"},"bar":2}'
    decoded = codec.decode_create_conversation(body)
    request, ignored = decoded.body, decoded.ignored
    assert request == CreateConversation(items=[Message("user", "hi"), Unknown(STRANGE)], metadata={"a": "b"})
    assert sorted(ignored) == ["bar", "items[0].foo"]


def test_added_items_are_decoded() -> None:
    body = msgspec.json.encode({"items": [MESSAGE] * 20})
    assert codec.decode_add_items(body) == Decoded(AddItems(items=[Message("user", "hi")] * 20), ())


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}])
def test_metadata_update_is_decoded(metadata: dict[str, str] | None) -> None:
    body = msgspec.json.encode({"metadata": metadata})
    assert codec.decode_update_conversation(body) == Decoded(UpdateConversation(metadata=metadata), ())


def test_count_request_ignores_parameters_outside_the_prompt() -> None:
    body = {
        "model": "m",
        "input": [MESSAGE],
        "conversation": {"id": "conv_1"},
        "tool_choice": {"type": "tool", "name": "f"},
        "personality": "friendly",
        "temperature": 1,
    }
    decoded = codec.decode_count(msgspec.json.encode(body))
    request, ignored = decoded.body, decoded.ignored
    assert request == CountRequest(
        model="m",
        input=[Message("user", "hi")],
        conversation=ConversationRef("conv_1"),
        tool_choice=FunctionChoice("f"),
    )
    assert sorted(ignored) == ["personality", "temperature"]


@pytest.mark.parametrize(
    ("decode", "body", "param"),
    [
        (codec.decode_create_conversation, {"items": "hi"}, "items"),
        (codec.decode_create_conversation, {"items": [MESSAGE] * 21}, "items"),
        (codec.decode_create_conversation, {"metadata": {"k" * 65: "v"}}, "metadata"),
        (codec.decode_add_items, {}, "items"),
        (codec.decode_add_items, {"items": None}, "items"),
        (codec.decode_add_items, {"items": [MESSAGE] * 21}, "items"),
        (codec.decode_add_items, {"items": [MESSAGE, {"role": "x", "content": ""}]}, "items[1].role"),
        (codec.decode_update_conversation, {}, "metadata"),
        (codec.decode_update_conversation, {"metadata": []}, "metadata"),
        (codec.decode_count, {"model": "m", "input": 3}, "input"),
        (codec.decode_count, {"model": "m", "tools": [{"type": "function"}]}, "tools[0].name"),
        (codec.decode_count, {"model": "m", "truncation": "some"}, "truncation"),
    ],
)
def test_invalid_body_is_rejected_with_param_path(decode: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(msgspec.json.encode(body))
    assert caught.value.param == param


def test_conversation_is_encoded_with_all_fields() -> None:
    assert msgspec.json.decode(codec.encode(Conversation("conv_1", 7, {}))) == {
        "id": "conv_1",
        "object": "conversation",
        "created_at": 7,
        "metadata": {},
    }
