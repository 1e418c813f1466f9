"""Which parameters are refused, by which name."""

from typing import Any

import pytest

from antiphon.backends.base import ALL_CAPABILITIES, Capabilities
from antiphon.engine.prepare.parameters import UNIMPLEMENTED, WEBSOCKET_PARAMETERS, check_capabilities, check_parameters
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest

NOTHING = Capabilities()


def request(**fields: Any) -> CreateRequest:
    return codec.decode_request(codec.encode({"model": "m", "input": "hi"} | fields)).request


def check(*, on_websocket: bool = False, may_be_empty: bool = False, **fields: Any) -> None:
    asked = request(**fields)
    check_parameters(asked, client_input=asked.input, on_websocket=on_websocket, may_be_empty=may_be_empty)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "missing_required_parameter"),
    ({"model": ""}, "model", "missing_required_parameter"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": ""}, "input", "invalid_value"),
    ({"input": [], "prompt": {"id": "p"}}, "input", "invalid_value"),
    ({"input": [{"role": "user", "content": "hi"}, {"type": "acme:x", "id": 5}]}, "input[1].id", "invalid_type"),
    (
        {"previous_response_id": "resp_1", "conversation": "conv_1"},
        "previous_response_id",
        "mutually_exclusive_parameters",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "missing_required_parameter"),
    ({"background": True, "store": False}, "background", "invalid_value"),
    (
        {"context_management": [{"type": "compaction"}, {"type": "forget"}]},
        "context_management[1].type",
        "unsupported_parameter",
    ),
    ({"moderation": {"model": "m"}}, "moderation", "unsupported_parameter"),
    ({"image": {"context_compression": "auto"}}, "image", "unsupported_parameter"),
    ({"access_programs": {"cyber": "standard"}}, "access_programs", "unsupported_parameter"),
    ({"generate": False}, "generate", "unsupported_parameter"),
    ({"stream_id": "s"}, "stream_id", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
def test_a_request_that_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**fields)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)


def test_every_unimplemented_parameter_has_a_case_above() -> None:
    refused = {param for _, param, code in REFUSED if code == "unsupported_parameter"}
    assert refused - {"context_management[1].type"} == {*UNIMPLEMENTED, *WEBSOCKET_PARAMETERS}


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"generate": True},
        {"context_management": [{"type": "compaction", "compact_threshold": 1}]},
        {"input": None, "instructions": "Speak."},
        {"input": [], "instructions": "Speak."},
        {"input": None, "previous_response_id": "resp_1"},
        {"input": [], "previous_response_id": "resp_1"},
        {"input": None, "conversation": "conv_1"},
        {"input": "", "conversation": {"id": "conv_1"}},
    ],
)
def test_values_that_ask_for_nothing_special_are_welcome(fields: dict[str, Any]) -> None:
    check(**fields)


def test_what_only_prepares_and_what_is_only_compacted_may_be_empty() -> None:
    check(input=[], generate=False, on_websocket=True)
    check(input=[], may_be_empty=True)


DEMANDS: list[tuple[dict[str, Any], str]] = [
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
]


@pytest.mark.parametrize(("fields", "param"), DEMANDS)
def test_what_the_backend_lacks_is_refused_and_what_it_has_is_not(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_capabilities(request(**fields), NOTHING, "tiny")
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    assert check_capabilities(request(**fields), ALL_CAPABILITIES, "tiny") == []


def test_reasoning_on_a_model_that_does_not_reason_is_a_warning_not_an_error() -> None:
    asked = request(reasoning={"effort": "low", "summary": "auto"})
    assert check_capabilities(asked, NOTHING, "tiny") == ["reasoning: the model does not reason"]
    assert check_capabilities(asked, ALL_CAPABILITIES, "tiny") == []


def test_padding_that_was_asked_for_and_is_not_there_is_told() -> None:
    padded, plain = (request(stream_options={"include_obfuscation": asked}) for asked in (True, False))
    assert check_capabilities(padded, ALL_CAPABILITIES, "tiny") == [
        "stream_options.include_obfuscation: streams are never padded"
    ]
    assert check_capabilities(plain, ALL_CAPABILITIES, "tiny") == []


def test_what_has_no_effect_on_the_model_is_told() -> None:
    idle = Capabilities(list_ignored=lambda request, model: [f"user of {model}"] if request.user else [])
    assert check_capabilities(request(user="u"), idle, "tiny") == ["no effect on this model: user of tiny"]
    assert check_capabilities(request(), idle, "tiny") == []
