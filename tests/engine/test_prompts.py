"""Prompt templates: versions, variables, and their use in requests."""

from typing import Any

import pytest

from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol.content import InputImage, InputText
from antiphon.protocol.items import Message
from antiphon.protocol.prompt import Prompt, PromptDefinition, PromptSummary
from antiphon.protocol.request import CreateRequest, PromptRef
from antiphon.protocol.unions import Unknown
from support.engine_harness import EngineHarness

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}


async def define(
    harness: EngineHarness, template: dict[str, Any], *, project: str = "default", **fields: Any
) -> Prompt:
    return await harness.engine.prompts.define(project, PromptDefinition(template=template, **fields))


async def fill(
    harness: EngineHarness, template: dict[str, Any], request: CreateRequest | None = None, **variables: Any
) -> Any:
    made = await define(harness, template)
    request = request or CreateRequest()
    request.prompt = PromptRef(made.id, variables or None)
    return await harness.engine.prompts.apply_template(request, "default")


async def refusal(harness: EngineHarness, template: dict[str, Any], **fields: Any) -> tuple[str | None, str | None]:
    """Return the param and the code of the error for this definition."""
    with pytest.raises(InvalidRequest) as caught:
        await define(harness, template, **fields)
    return caught.value.param, caught.value.code


async def test_versions_are_numbered_and_the_latest_is_retrieved(harness: EngineHarness) -> None:
    first = await define(harness, {"instructions": "one"})
    second = await define(harness, {"instructions": "two"}, id=first.id)
    assert first == Prompt(first.id, "1", first.created_at, {"instructions": "one"})
    assert second == Prompt(first.id, "2", second.created_at, {"instructions": "two"})
    assert await harness.engine.prompts.retrieve("default", first.id, None) == second
    assert await harness.engine.prompts.retrieve("default", first.id, "1") == first
    assert await harness.engine.prompts.list_all("default") == [
        PromptSummary(first.id, "1", first.created_at),
        PromptSummary(first.id, "2", second.created_at),
    ]


async def test_numbering_skips_taken_version_numbers(harness: EngineHarness) -> None:
    for version in ("2", "1"):
        await define(harness, {}, id="greet", version=version)
    assert (await define(harness, {}, id="greet")).version == "3"


async def test_version_cannot_be_redefined(harness: EngineHarness) -> None:
    await define(harness, {}, id="greet", version="1")
    assert await refusal(harness, {}, id="greet", version="1") == ("version", "invalid_value")


async def test_version_after_a_named_one_must_be_named(harness: EngineHarness) -> None:
    await define(harness, {}, id="greet", version="beta")
    assert await refusal(harness, {}, id="greet") == ("version", "invalid_value")


async def test_deleted_prompt_is_not_found(harness: EngineHarness) -> None:
    made = await define(harness, {})
    await harness.engine.prompts.delete("default", made.id)
    for version in (None, "1"):
        with pytest.raises(NotFound):
            await harness.engine.prompts.retrieve("default", made.id, version)
    with pytest.raises(NotFound):
        await harness.engine.prompts.delete("default", made.id)


async def test_variables_are_replaced_in_instructions_and_input(harness: EngineHarness) -> None:
    template = {
        "instructions": "Speak like {{ who }} of {{place}}.",
        "input": [{"role": "user", "content": "I am {{who}}."}, {"role": "user", "content": "Hi"}],
    }
    filled = await fill(harness, template, who="Ada", place={"type": "input_text", "text": "London"})
    assert filled.instructions == "Speak like Ada of London."
    assert filled.input == [Message("user", "I am Ada."), Message("user", "Hi")]


async def test_variable_alone_in_a_part_may_be_an_image(harness: EngineHarness) -> None:
    parts = [{"type": "input_text", "text": "Look:"}, {"type": "input_text", "text": "{{picture}}"}]
    filled = await fill(harness, {"input": [{"role": "user", "content": parts}]}, picture=IMAGE)
    assert filled.input == [
        Message("user", [InputText("Look:"), InputImage(image_url=IMAGE["image_url"], detail="low")])
    ]


async def test_image_inside_a_text_is_refused(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await fill(harness, {"instructions": "See {{picture}}"}, picture=IMAGE)
    assert (caught.value.param, caught.value.code) == ("prompt.variables.picture", "invalid_type")


async def test_value_that_is_not_a_part_is_refused_with_its_path(harness: EngineHarness) -> None:
    parts = [{"type": "input_text", "text": "{{picture}}"}]
    with pytest.raises(InvalidRequest) as caught:
        await fill(
            harness, {"input": [{"role": "user", "content": parts}]}, picture={"type": "input_image", "detail": 1}
        )
    assert caught.value.param == "prompt.input[0].content[0].detail"


@pytest.mark.parametrize(
    ("variables", "param", "code"),
    [
        ({}, "prompt.variables.name", "missing_required_parameter"),
        ({"name": "Ada", "nam": "Ada"}, "prompt.variables.nam", "invalid_value"),
    ],
)
async def test_missing_and_unknown_variables_are_refused_by_name(
    harness: EngineHarness, variables: dict[str, str], param: str, code: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await fill(harness, {"instructions": "Greet {{name}}."}, **variables)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


async def test_request_values_override_the_template(harness: EngineHarness) -> None:
    template = {"model": "big", "instructions": "Be brief.", "temperature": 0.5, "tools": [], "metadata": {"a": "1"}}
    sent_request = CreateRequest(model="small", temperature=0.0, metadata={})
    filled = await fill(harness, template, sent_request)
    assert filled == CreateRequest(
        model="small", temperature=0.0, metadata={}, instructions="Be brief.", tools=[], prompt=filled.prompt
    )


async def test_template_input_comes_before_request_input(harness: EngineHarness) -> None:
    unknown = Unknown(b'{"type":"acme:thing"}')
    assert (await fill(harness, {"input": "first"}, CreateRequest(input="then"))).input == [
        Message("user", "first"),
        Message("user", "then"),
    ]
    assert (await fill(harness, {"input": "first"}, CreateRequest(input=[unknown]))).input == [
        Message("user", "first"),
        unknown,
    ]
    assert (await fill(harness, {"input": "alone"})).input == "alone"


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        ({"temperature": 3}, ("template.temperature", "invalid_value")),
        ({"input": [{"role": "robot", "content": "{{x}}"}]}, ("template.input[0].role", "invalid_value")),
        ({"input": [{"type": "acme:x", "id": 5}]}, ("template.input[0].id", "invalid_type")),
        ({"instruction": "x"}, ("template.instruction", "unknown_parameter")),
        ({"previous_response_id": "resp_1"}, ("template.previous_response_id", "invalid_value")),
        ({"stream": True}, ("template.stream", "invalid_value")),
    ],
)
async def test_invalid_template_is_refused_with_its_path(
    harness: EngineHarness, template: dict[str, Any], refused: tuple[str, str]
) -> None:
    assert await refusal(harness, template) == refused
    assert await harness.engine.prompts.list_all("default") == []


async def test_too_deeply_nested_template_is_refused(harness: EngineHarness) -> None:
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"properties": deep}
    tools = [{"type": "function", "name": "f", "parameters": deep}]
    assert await refusal(harness, {"tools": tools}) == ("template", "invalid_value")


async def test_other_project_sees_no_responses(harness: EngineHarness) -> None:
    made = await define(harness, {})
    prompts = harness.engine.prompts
    assert await prompts.list_all("other") == []
    for attempt in (
        prompts.retrieve("other", made.id, None),
        prompts.delete("other", made.id),
        prompts.apply_template(CreateRequest(prompt=PromptRef(made.id)), "other"),
    ):
        with pytest.raises(NotFound):
            await attempt
    assert (await define(harness, {}, project="other", id=made.id)).version == "1"


async def test_response_from_a_prompt_echoes_the_prompt(make_harness: Any) -> None:
    harness = await make_harness({"rules": [{"text": "Speak like Ada.", "answers": ["Indeed."]}]})
    made = await define(harness, {"model": "scripted", "instructions": "Speak like {{who}}."})
    sent_request = {"id": made.id, "version": "1", "variables": {"who": "Ada"}}
    response = await harness.answer("Hello", model=None, prompt=sent_request)
    assert response.output_text == "Indeed."
    assert (response.prompt, response.instructions) == (PromptRef(made.id, {"who": "Ada"}, "1"), "Speak like Ada.")


async def test_unknown_version_is_not_found(harness: EngineHarness) -> None:
    made = await define(harness, {})
    with pytest.raises(NotFound) as caught:
        await harness.ask(prompt={"id": made.id, "version": "7"})
    assert (caught.value.param, caught.value.message) == (
        "prompt",
        f"Prompt with id '{made.id}' and version '7' not found.",
    )


async def test_items_that_a_template_refers_to_count_in_the_history_budget(make_harness: Any) -> None:
    harness: EngineHarness = await make_harness({"default": "done"}, history_budget_bytes=1_000_000)
    message = {"type": "message", "id": "msg_large", "role": "user", "content": "x" * 1_000_000}
    await harness.answer([message])
    made = await define(harness, {"input": [{"type": "item_reference", "id": "msg_large"}]})
    with pytest.raises(InvalidRequest) as caught:
        await harness.answer("More.", prompt={"id": made.id})
    assert (caught.value.param, caught.value.code) == ("input", "history_too_large")
