"""Checks of request parameters, media and configuration updates."""

from typing import Any

import pytest

from antiphon.backends.base import ALL_CAPABILITIES, Capabilities
from antiphon.engine.prepare.parameters import (
    UNIMPLEMENTED,
    WEBSOCKET_PARAMETERS,
    apply_configuration_updates,
    check_capabilities,
    check_configuration_updates,
    check_media,
    check_parameters,
)
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.content import AudioData, InputAudio, InputFile, InputImage, InputText, InputVideo
from antiphon.protocol.items import ITEMS, FunctionCallOutput, Item, Message
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, ReasoningConfig, TextConfig, TextFormat
from antiphon.protocol.unions import Unknown
from support.engine_harness import EngineHarness

NOTHING = Capabilities()


def request(**fields: Any) -> CreateRequest:
    return codec.decode_request(codec.encode({"model": "m", "input": "hi"} | fields)).body


def check(*, on_websocket: bool = False, may_be_empty: bool = False, **fields: Any) -> None:
    sent_request = request(**fields)
    check_parameters(
        sent_request, client_input=sent_request.input, on_websocket=on_websocket, may_be_empty=may_be_empty
    )


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
def test_unsupported_parameter_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**fields)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)


def test_every_unimplemented_parameter_has_a_case() -> None:
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
def test_default_values_are_accepted(fields: dict[str, Any]) -> None:
    check(**fields)


def test_warmup_and_compaction_requests_may_be_empty() -> None:
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
def test_parameters_are_checked_against_capabilities(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_capabilities(request(**fields), NOTHING, "tiny")
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    assert check_capabilities(request(**fields), ALL_CAPABILITIES, "tiny") == []


def test_reasoning_on_a_model_without_reasoning_is_a_warning() -> None:
    sent_request = request(reasoning={"effort": "low", "summary": "auto"})
    assert check_capabilities(sent_request, NOTHING, "tiny") == ["reasoning: the model does not reason"]
    assert check_capabilities(sent_request, ALL_CAPABILITIES, "tiny") == []


def test_obfuscation_without_padding_is_a_warning() -> None:
    padded, plain = (request(stream_options={"include_obfuscation": sent_request}) for sent_request in (True, False))
    assert check_capabilities(padded, ALL_CAPABILITIES, "tiny") == [
        "stream_options.include_obfuscation: streams are never padded"
    ]
    assert check_capabilities(plain, ALL_CAPABILITIES, "tiny") == []


def test_parameters_without_effect_produce_a_warning() -> None:
    idle = Capabilities(list_ignored=lambda request, model: [f"user of {model}"] if request.user else [])
    assert check_capabilities(request(user="u"), idle, "tiny") == ["no effect on this model: user of tiny"]
    assert check_capabilities(request(), idle, "tiny") == []


# Configuration updates


OBJECT = {"format": {"type": "json_object"}}


def update(**fields: Any) -> Item | Unknown:
    return ITEMS.decode(codec.encode({"type": "configuration_update", **fields}))


def test_latest_update_of_each_setting_applies() -> None:
    sent_request = CreateRequest(reasoning=ReasoningConfig("high", "auto"), text=TextConfig(TextFormat(), "low"))
    items = [
        update(reasoning={"effort": "low"}, text=OBJECT),
        Message("user", "hi"),
        update(reasoning={"effort": "medium"}),
    ]
    changed, useless = apply_configuration_updates(sent_request, items)
    assert useless == []
    assert (changed.reasoning, changed.text) == (
        ReasoningConfig("medium", "auto"),
        TextConfig(JsonObjectFormat(), "low"),
    )
    assert (sent_request.reasoning, sent_request.text) == (
        ReasoningConfig("high", "auto"),
        TextConfig(TextFormat(), "low"),
    )


def test_request_without_updates_stays_unchanged() -> None:
    sent_request = CreateRequest()
    changed, useless = apply_configuration_updates(sent_request, [Message("user", "hi")])
    assert (changed is sent_request, useless) == (True, [])


def test_invalid_update_in_the_history_is_skipped_with_a_warning() -> None:
    damaged = update(id="cu_1", reasoning={"effort": "huge"})
    changed, useless = apply_configuration_updates(CreateRequest(), [damaged, update(reasoning={"effort": "low"})])
    assert changed.reasoning == ReasoningConfig("low")
    assert [each.partition(":")[0] for each in useless] == ["the configuration_update cu_1 was left out"]


async def test_conversation_refuses_an_invalid_update(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await harness.engine.conversations.create("default", [update(reasoning={"effort": "huge"})], None)
    assert caught.value.param == "items[0].reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "huge"}}, "input[0].reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "input[0].text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "input[0].text.format.schema"),
    ],
)
def test_invalid_update_is_refused_with_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_configuration_updates([update(**fields)])
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


async def test_update_applies_to_later_turns_and_is_echoed(make_harness: Any) -> None:
    harness = await make_harness()
    sent = {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": OBJECT}
    first = await harness.answer([sent, {"role": "user", "content": "hi"}])
    second = await harness.answer("again", previous_response_id=first.id, reasoning={"effort": "high"})
    assert [(each.reasoning.effort, each.text.format) for each in (first, second)] == [("low", JsonObjectFormat())] * 2


IMAGE = InputImage(image_url="data:image/png;base64,AA==")
FILE = InputFile(file_data="data:text/plain;base64,AA==")


@pytest.mark.parametrize(
    ("item", "param", "message"),
    [
        (Message("user", [InputText("a"), IMAGE]), "input[0].content[1]", "cannot read images"),
        (Message("user", [InputAudio(AudioData("AA==", "mp3"))]), "input[0].content[0]", "cannot read audio"),
        (Message("user", [InputVideo("https://a.example/v")]), "input[0].content[0]", "cannot read video"),
        (FunctionCallOutput([IMAGE], "c"), "input[0].output[0]", "cannot read images"),
        (Message("user", [InputImage()]), "input[0].content[0]", "not none"),
        (Message("user", [InputImage(image_url="a", file_id="b")]), "input[0].content[0]", "not 'image_url' and 'file"),
        (Message("user", [InputFile(filename="a.txt")]), "input[0].content[0]", "not none"),
    ],
)
def test_unsupported_media_are_refused_with_their_path(item: Item, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_media([item], Capabilities(), "tiny")
    assert caught.value.param == param


def test_file_is_accepted_for_a_model_that_reads_no_files() -> None:
    check_media([Message("user", [FILE])], Capabilities(), "tiny")


def test_capable_model_accepts_all_media() -> None:
    check_media([Message("user", [InputText("a"), IMAGE, FILE])], ALL_CAPABILITIES, "big")
