"""The request body of the Responses contract. Each test name cites the line of the contract that it checks."""

import json
from typing import Any

import msgspec
import pytest

from antiphon.backends.responses.contract import (
    ReasoningControls,
    ResponsesApiRequest,
    TextControls,
    is_azure,
    takes_verbosity,
    validate,
)
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.items import Message
from antiphon.protocol.tools import FunctionTool
from antiphon.protocol.unions import Unknown

MINIMAL: dict[str, Any] = {
    "model": "gpt-5",
    "instructions": "You are a helpful assistant.",
    "input": [],
    "tools": [],
    "store": False,
    "include": [],
}
COMPLETE = MINIMAL | {"tool_choice": "auto", "parallel_tool_calls": False, "stream": True}


def write(request: ResponsesApiRequest) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(codec.encode(request))
    return written


def test_s5_1_nine_required_keys_are_always_present() -> None:
    assert write(ResponsesApiRequest(**MINIMAL)) == COMPLETE
    assert set(COMPLETE) == {
        "model",
        "instructions",
        "input",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "store",
        "stream",
        "include",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tool_choice", "none"),
        ("tool_choice", "required"),
        ("parallel_tool_calls", True),
        ("stream", False),
        ("stream", None),
        ("store", None),
        ("include", None),
        ("model", ""),
        ("unknown_field", 1),
    ],
)
def test_s5_2_other_values_are_rejected_by_type(key: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=key if value != "" else "model"):
        msgspec.json.decode(json.dumps(COMPLETE | {key: value}), type=ResponsesApiRequest)


@pytest.mark.parametrize(("key", "value"), [("tool_choice", "none"), ("parallel_tool_calls", True), ("stream", False)])
def test_s5_2_constructor_enforces_the_literals(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        ResponsesApiRequest(**MINIMAL, **{key: value})


@pytest.mark.parametrize(
    ("base_url", "wire_api", "name", "azure"),
    [
        ("https://my-resource.openai.azure.com", "Responses", "azure", True),
        ("https://my-resource.openai.azure.com/openai/v1", "responses", "upstream", True),
        ("https://MY.OpenAI.AZURE.COM", "RESPONSES", "", True),
        ("https://x.cognitiveservices.azure.cn/openai", "responses", "", True),
        ("https://x.aoai.azure.us", "responses", "", True),
        ("https://gateway.azure-api.net/openai", "responses", "", True),
        ("https://front.azurefd.net/openai", "responses", "", True),
        ("https://example.org/v1", "responses", "Azure", True),
        ("https://api.openai.com/v1", "responses", "openai", False),
        ("https://my-resource.openai.azure.com", "chat", "azure", False),
        ("https://example.org/azure", "responses", "azure-like", False),
    ],
)
def test_s5_4_azure_is_detected_by_url_or_name(base_url: str, wire_api: str, name: str, *, azure: bool) -> None:
    assert is_azure(base_url, wire_api=wire_api, name=name) is azure


def test_s5_6_unset_fields_are_omitted() -> None:
    assert not {"reasoning", "prompt_cache_key", "text"} & set(write(ResponsesApiRequest(**MINIMAL)))
    full = ResponsesApiRequest(
        **MINIMAL | {"include": ["reasoning.encrypted_content"]},
        reasoning=ReasoningControls(effort="medium"),
        prompt_cache_key="conv_123",
        text=TextControls(verbosity="medium"),
    )
    assert write(full) == COMPLETE | {
        "reasoning": {"effort": "medium"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "conv_123",
        "text": {"verbosity": "medium"},
    }


def test_s5_6_summary_may_be_a_boolean() -> None:
    assert ReasoningControls(summary=True) == ReasoningControls(summary="auto")
    assert msgspec.to_builtins(ReasoningControls(effort="low", summary=False)) == {"effort": "low"}


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_s5_8_text_has_verbosity_and_format(verbosity: Any) -> None:
    schema = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}
    controls = TextControls(verbosity=verbosity, format=schema)
    assert msgspec.to_builtins(controls) == {"verbosity": verbosity, "format": schema}


def test_s5_8_unknown_verbosity_is_rejected() -> None:
    with pytest.raises(msgspec.ValidationError, match="verbosity"):
        msgspec.json.decode(b'{"verbosity":"shouting"}', type=TextControls)


@pytest.mark.parametrize(
    ("model", "takes"),
    [("gpt-5", True), ("gpt-5.2-codex", True), ("openai/GPT-5-mini", True), ("gpt-4o", False), ("llama", False)],
)
def test_s5_9_only_gpt_5_models_take_verbosity(model: str, *, takes: bool) -> None:
    assert takes_verbosity(model) is takes


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"instructions": ""}, "input"),
        ({"input": [Unknown(b"{}")]}, "input[0].type"),
        ({"tools": [FunctionTool("f"), Unknown(b'{"type":7}')]}, "tools[1].type"),
        ({"tools": [FunctionTool("f"), FunctionTool("f")]}, "tools"),
    ],
)
def test_s5_13_invalid_request_is_rejected_with_param(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ResponsesApiRequest(**MINIMAL | changes))
    assert caught.value.param == param


def test_s5_13_valid_request_passes() -> None:
    validate(ResponsesApiRequest(**MINIMAL | {"input": [Message("user", "hi")], "tools": [FunctionTool("f")]}))
    validate(ResponsesApiRequest(**MINIMAL | {"instructions": "", "input": [Message("user", "hi")]}))
