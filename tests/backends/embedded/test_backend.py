"""The embedded backend on its real model."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import msgspec
import pytest
import pytest_asyncio

from antiphon.backends.base import Turn
from antiphon.backends.embedded.backend import EmbeddedBackend, create
from antiphon.backends.embedded.weights import find_weights
from antiphon.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Unavailable
from antiphon.protocol import codec
from antiphon.protocol.items import Message
from antiphon.stream.deltas import Delta, Finish, Text, TokenUsage, ToolCall

pytestmark = pytest.mark.asyncio(loop_scope="module")

WINDOW = 512


def function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": description, "parameters": parameters}


WEATHER = function("get_weather", "Get the current weather for a city", city={"enum": ["Paris", "London", "Oslo"]})
ROLL = function("roll", "Roll dice", sides={"type": "integer", "minimum": 2, "maximum": 9})
NOW = {"type": "function", "name": "now", "description": "Tell the time"}
TOOLS = [WEATHER, ROLL, NOW]
SCHEMAS = {"get_weather": WEATHER["parameters"], "roll": ROLL["parameters"], "now": {"const": {}}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[EmbeddedBackend]:
    backend = EmbeddedBackend(find_weights("smollm2-135m"), context=WINDOW, slots=2, tool_examples=False)
    await backend.start()
    yield backend
    await backend.close()


def turn(input: Any, **parameters: Any) -> Turn:
    body = {"model": "smollm2-135m", "input": input, "temperature": 0, **parameters}
    request = codec.decode_request(json.dumps(body).encode()).request
    items = [Message("user", request.input)] if isinstance(request.input, str) else request.input
    return Turn(request=request, items=items or [])


class Said:
    """A whole answer."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.texts = [delta.text for delta in deltas if isinstance(delta, Text)]
        self.text = "".join(self.texts)
        self.logprobs = [each for delta in deltas if isinstance(delta, Text) for each in delta.logprobs]
        self.usage = next(delta.usage for delta in deltas if isinstance(delta, TokenUsage))
        self.end = deltas[-1]
        calls: dict[int | str, list[str]] = {}
        for delta in deltas:
            if isinstance(delta, ToolCall):
                call = calls.setdefault(delta.key, ["", ""])
                call[0] += delta.name
                call[1] += delta.arguments
        self.calls = [tuple(call) for call in calls.values()]


async def ask(backend: EmbeddedBackend, input: Any, **parameters: Any) -> Said:
    deltas: list[Delta] = []
    async for batch in await backend.stream(turn(input, **parameters)):
        deltas += batch
    return Said(deltas)


async def test_an_answer_comes_in_pieces_and_ends_when_the_model_ends_its_turn(backend: EmbeddedBackend) -> None:
    said = await ask(backend, "What is the capital of France? Answer in one word.", max_output_tokens=60)
    assert len(said.texts) > 1
    assert "Paris" in said.text
    assert "<|im_end|>" not in said.text
    assert said.end == Finish("stop")


async def test_an_answer_cut_at_max_output_tokens_ends_in_length(backend: EmbeddedBackend) -> None:
    said = await ask(backend, "Tell me a long story.", max_output_tokens=5)
    assert (said.usage.output_tokens, said.end) == (5, Finish("length"))


async def test_temperature_zero_says_the_same_again(backend: EmbeddedBackend) -> None:
    first, second = [await ask(backend, "Name a color.", max_output_tokens=8) for _ in range(2)]
    assert first.text == second.text


async def test_chance_is_the_same_for_the_same_response_and_another_for_every_other(backend: EmbeddedBackend) -> None:
    asked = turn("Tell me a long story.", temperature=1, max_output_tokens=40)
    said = []
    for response_id in ("resp_a", "resp_b", "resp_a", "", ""):
        stream = await backend.stream(msgspec.structs.replace(asked, response_id=response_id))
        said.append(Said([delta async for batch in stream for delta in batch]).text)
    a, b, again, *free = said
    assert again == a
    assert len({a, b, *free}) == 4


async def test_sampling_parameters_are_taken(backend: EmbeddedBackend) -> None:
    sampling = {"temperature": 1.5, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": 1}
    said = await ask(backend, "Name a color.", max_output_tokens=4, **sampling)
    assert said.text


def count_repeats(text: str) -> int:
    words = text.split()
    return len(words) - len(set(words))


async def test_a_frequency_penalty_makes_the_model_repeat_itself_less(backend: EmbeddedBackend) -> None:
    story = "Tell a story about the fox and the fox and the fox."
    plain = await ask(backend, story, max_output_tokens=60)
    penalized = await ask(backend, story, max_output_tokens=60, frequency_penalty=2)
    assert count_repeats(penalized.text) < count_repeats(plain.text)


async def test_usage_is_what_the_model_read_and_wrote(backend: EmbeddedBackend) -> None:
    asked = turn("Name an animal.", max_output_tokens=4)
    read = await backend.count_tokens(asked)
    said = await ask(backend, "Name an animal.", max_output_tokens=4)
    again = await ask(backend, "Name an animal.", max_output_tokens=4)
    assert said.usage.input_tokens == read
    assert said.usage.total_tokens == read + 4
    assert 0 < again.usage.input_tokens_details.cached_tokens < read


async def test_count_tokens_grows_by_the_tokens_of_the_text(backend: EmbeddedBackend) -> None:
    one, three = [await backend.count_tokens(turn("hello" + " hello" * more)) for more in (0, 2)]
    assert three == one + 2


async def test_too_long_an_input_is_refused_with_the_numbers(backend: EmbeddedBackend) -> None:
    asked = turn("word " * 1100, max_output_tokens=7)
    length = await backend.count_tokens(asked)
    with pytest.raises(ContextLengthExceeded) as refusal:
        await backend.stream(asked)
    assert refusal.value.param == "input"
    assert all(number in refusal.value.message for number in (str(WINDOW), str(length), "7"))


async def test_an_answer_that_fills_the_window_ends_in_length() -> None:
    backend = EmbeddedBackend(find_weights("smollm2-135m"), context=256, slots=1)
    await backend.start()
    try:
        schema = {"type": "array", "items": {"enum": ["again"]}, "minItems": 100}
        form = {"format": {"type": "json_schema", "name": "list", "schema": schema}}
        said = await ask(backend, "word " * 180, text=form)
    finally:
        await backend.close()
    assert (said.usage.total_tokens, said.end) == (256, Finish("length"))


async def test_an_answer_follows_its_schema(backend: EmbeddedBackend) -> None:
    said = await ask(backend, "Anna is 31 years old.", text=PERSON_FORMAT, max_output_tokens=40)
    assert said.end == Finish("stop")
    jsonschema.validate(json.loads(said.text), PERSON)


async def test_a_json_object_is_one(backend: EmbeddedBackend) -> None:
    said = await ask(backend, "Anna is 31 years old.", text={"format": {"type": "json_object"}}, max_output_tokens=60)
    assert said.end == Finish("stop")
    assert isinstance(json.loads(said.text), dict)


def check_calls(said: Said, allowed: set[str]) -> None:
    assert said.end == Finish("stop")
    assert said.text == ""
    assert said.calls
    for name, arguments in said.calls:
        assert name in allowed
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


async def test_a_required_call_is_made(backend: EmbeddedBackend) -> None:
    said = await ask(backend, "Hello", tools=TOOLS, tool_choice="required", max_output_tokens=300)
    check_calls(said, set(SCHEMAS))


@pytest.mark.parametrize("name", ["get_weather", "roll", "now"])
async def test_a_named_function_is_called_once(backend: EmbeddedBackend, name: str) -> None:
    choice = {"type": "function", "name": name}
    said = await ask(backend, "Hello", tools=TOOLS, tool_choice=choice, max_output_tokens=60)
    check_calls(said, {name})
    assert len(said.calls) == 1


async def test_only_allowed_tools_are_called(backend: EmbeddedBackend) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "roll"}]}
    said = await ask(backend, "Weather in Paris?", tools=TOOLS, tool_choice=choice, max_output_tokens=300)
    check_calls(said, {"roll"})


async def test_without_parallel_calls_there_is_one(backend: EmbeddedBackend) -> None:
    said = await ask(
        backend, "Hello", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_output_tokens=60
    )
    check_calls(said, set(SCHEMAS))
    assert len(said.calls) == 1


async def test_with_choice_none_nothing_is_called(backend: EmbeddedBackend) -> None:
    said = await ask(backend, "Weather in Paris?", tools=TOOLS, tool_choice="none", max_output_tokens=8)
    assert said.text
    assert said.calls == []


async def test_with_tools_and_a_schema_the_answer_is_a_call_or_follows_the_schema(backend: EmbeddedBackend) -> None:
    both = {"tools": TOOLS, "text": PERSON_FORMAT, "parallel_tool_calls": False}
    said = await ask(backend, "Anna is 31 years old.", max_output_tokens=60, **both)
    if said.calls:
        check_calls(said, set(SCHEMAS))
    else:
        jsonschema.validate(json.loads(said.text), PERSON)


async def test_left_to_itself_the_model_talks_or_calls_as_fits() -> None:
    backend = EmbeddedBackend(find_weights("smollm2-135m"), context=2 * WINDOW, slots=1)
    await backend.start()
    try:
        tools = [function("get_weather", "Get the current weather for a city", city={"type": "string"})]
        question = "What is the weather in Paris?"
        greeted = await ask(backend, "Hello!", tools=tools, max_output_tokens=8)
        called = await ask(backend, question, tools=tools, max_output_tokens=120)
        read = await backend.count_tokens(turn(question, tools=tools))
        call = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": '{"city": "Paris"}'}
        result = {"type": "function_call_output", "call_id": "1", "output": "sunny, 21 C"}
        told = await ask(
            backend, [{"role": "user", "content": question}, call, result], tools=tools, max_output_tokens=16
        )
    finally:
        await backend.close()
    assert greeted.calls == []
    assert [(name, json.loads(arguments)) for name, arguments in called.calls] == [("get_weather", {"city": "Paris"})]
    assert (called.usage.input_tokens, called.end) == (read, Finish("stop"))
    assert "sunny" in told.text


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema.not"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}}, "text.format.schema"),
        ({"tools": [WEATHER, function("f", "", a={"pattern": "(?!a)b", "type": "string"})]}, "tools[1].parameters"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].type",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_before_the_stream(
    backend: EmbeddedBackend, parameters: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await backend.stream(turn(**{"input": "Hello", **parameters}))
    assert refusal.value.param == param


async def test_characters_of_several_tokens_come_whole(backend: EmbeddedBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "日本語 🎉 é"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    said = await ask(backend, "Hello", text=form, max_output_tokens=60)
    assert json.loads(said.text) == {"a": "日本語 🎉 é"}
    assert not any("\ufffd" in text for text in said.texts)


async def test_logprobs_describe_the_text(backend: EmbeddedBackend) -> None:
    said = await ask(backend, "Name a color.", max_output_tokens=4, top_logprobs=2)
    assert "".join(each.token for each in said.logprobs) == said.text
    assert [len(each.top_logprobs) for each in said.logprobs] == [2] * 4
    # Greedy: what was said is what was most likely.
    assert all(each.top_logprobs[0].token == each.token and each.logprob <= 0 for each in said.logprobs)
    assert all(bytes(each.bytes).decode() == each.token for each in said.logprobs)


async def test_without_being_asked_there_are_no_logprobs(backend: EmbeddedBackend) -> None:
    assert (await ask(backend, "Name a color.", max_output_tokens=2)).logprobs == []


async def test_more_turns_than_slots_are_all_answered_while_the_loop_goes_on(backend: EmbeddedBackend) -> None:
    turns = [asyncio.create_task(ask(backend, f"Count to {n}.", max_output_tokens=12)) for n in (3, 4, 5, 6)]
    wakeups = 0
    while not all(task.done() for task in turns):
        await asyncio.sleep(0)
        wakeups += 1
    said = [task.result() for task in turns]
    assert all(each.text for each in said)
    # A loop that was held up for the length of a token would come round a few times a token, not thousands of times.
    assert wakeups > 50 * sum(each.usage.output_tokens for each in said)


async def test_a_closed_answer_frees_its_slot(backend: EmbeddedBackend) -> None:
    endless = [await backend.stream(turn("Count to a million.")) for _ in range(2)]
    for answer in endless:
        await anext(answer)
        await answer.aclose()
    assert (await ask(backend, "Hi", max_output_tokens=2)).text


async def test_a_turn_given_up_in_the_line_leaves_it(backend: EmbeddedBackend) -> None:
    running = [await backend.stream(turn("Count to a million.")) for _ in range(2)]
    for answer in running:
        await anext(answer)
    waiting = asyncio.create_task(ask(backend, "Hello"))
    await anext(running[0])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for answer in running:
        await answer.aclose()
    assert (await ask(backend, "Hi", max_output_tokens=2)).text


async def test_an_answer_never_begun_takes_no_slot(backend: EmbeddedBackend) -> None:
    for _ in range(3):
        await (await backend.stream(turn("Count to a million."))).aclose()
    assert (await ask(backend, "Hi", max_output_tokens=2)).text


async def test_closing_the_backend_ends_what_runs_and_what_waits() -> None:
    backend = EmbeddedBackend(find_weights("smollm2-135m"), context=WINDOW, slots=1)
    await backend.start()
    running, waiting = [await backend.stream(turn("Count to a million.")) for _ in range(2)]
    await anext(running)
    queued = asyncio.ensure_future(anext(waiting))
    await anext(running)
    await backend.close()
    with pytest.raises(Unavailable):
        await queued
    with pytest.raises(Unavailable):
        async for _ in running:
            pass
    with pytest.raises(Unavailable):
        await backend.stream(turn("Hello"))


async def test_system_messages_are_read_before_all_others(backend: EmbeddedBackend) -> None:
    scattered = [{"role": "user", "content": "Hi"}, {"role": "developer", "content": "Be brief."}]
    ahead = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert await backend.count_tokens(turn(scattered)) == await backend.count_tokens(turn(ahead))


async def test_a_file_that_is_no_model_is_a_config_error(tmp_path: Any) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    backend = create("local", {"weights": str(tmp_path / "broken.gguf")}, tmp_path)
    with pytest.raises(ConfigError, match=r"broken\.gguf cannot be loaded"):
        await backend.start()


async def test_the_registry_makes_it_with_the_options_of_the_settings(tmp_path: Any) -> None:
    backend = create("local", {"context": 512}, tmp_path)
    (model,) = backend.models()
    assert (model.id, model.owned_by, model.context_window) == ("smollm2-135m", "local", 512)


async def test_a_wrong_option_is_a_config_error_that_names_it(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"backends\.local\.slots"):
        create("local", {"slots": 0}, tmp_path)
