"""The embedded backend on llama.cpp, with its real model where the text must make sense."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import pytest_asyncio

from antiphon.backends.base import Turn
from antiphon.backends.embedded.backend import EmbeddedBackend, create
from antiphon.backends.embedded.model import Generation
from antiphon.backends.embedded.weights import find_weights
from antiphon.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Unavailable
from antiphon.protocol import codec
from antiphon.protocol.items import Message
from antiphon.stream.deltas import Delta, Finish, Text, TokenUsage, ToolCall

pytestmark = pytest.mark.asyncio(loop_scope="module")

WINDOW = 512
HELD_CHUNKS = 20


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
async def whole_model() -> AsyncIterator[EmbeddedBackend]:
    """The backend of a default server, with a shorter window. Its texts make sense."""
    backend = EmbeddedBackend(find_weights("smollm2-135m"), context=2 * WINDOW, slots=1, batch=256)
    await backend.start()
    yield backend
    await backend.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(shallow_weights: Path) -> AsyncIterator[EmbeddedBackend]:
    backend = EmbeddedBackend(shallow_weights, context=WINDOW, slots=2, batch=256, tool_examples=False)
    await backend.start()
    yield backend
    await backend.close()


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that every answer waits for after its first chunks. Otherwise it may end before the test reads it."""
    go_on, chunks = threading.Event(), Counter[Generation]()
    receive = Generation.receive

    def receive_and_wait(generation: Generation, data: bytes) -> bool:
        chunks[generation] += 1
        assert chunks[generation] < HELD_CHUNKS or go_on.wait(60)
        return receive(generation, data)

    monkeypatch.setattr(Generation, "receive", receive_and_wait)
    return go_on


async def until_one_waits(backend: EmbeddedBackend) -> None:
    while not backend.queue.waiting:  # noqa: ASYNC110 - no event shows it
        await asyncio.sleep(0)


def make_turn(input: Any, **parameters: Any) -> Turn:
    body = {"model": "smollm2-135m", "input": input, "temperature": 0, **parameters}
    request = codec.decode_request(json.dumps(body).encode()).body
    items = [Message("user", request.input)] if isinstance(request.input, str) else request.input
    return Turn(request=request, items=items or [])


class Answer:
    """The texts, calls, logprobs and usage of an answer."""

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


async def generate(backend: EmbeddedBackend, input: Any, **parameters: Any) -> Answer:
    deltas: list[Delta] = []
    async for batch in await backend.stream(make_turn(input, **parameters)):
        deltas += batch
    return Answer(deltas)


async def generate_twice(backend: EmbeddedBackend, input: Any, **parameters: Any) -> list[Answer]:
    """Generate the same answer in the same slot, which is free a moment after the first answer has ended."""
    first = await generate(backend, input, **parameters)
    while backend._llama._generations:  # noqa: ASYNC110 - no event shows that the slot is free
        await asyncio.sleep(0)
    return [first, await generate(backend, input, **parameters)]


async def test_answer_is_streamed_and_ends_with_the_turn(whole_model: EmbeddedBackend) -> None:
    question = "What is the capital of France? Answer in one word."
    result = await generate(whole_model, question, max_output_tokens=60)
    assert len(result.texts) > 1
    assert "Paris" in result.text
    assert "<|im_end|>" not in result.text
    assert result.end == Finish("stop")


async def test_answer_cut_at_max_output_tokens_finishes_with_length(backend: EmbeddedBackend) -> None:
    result = await generate(backend, "Tell me a long story.", max_output_tokens=5)
    assert (result.usage.output_tokens, result.end) == (5, Finish("length"))


async def test_temperature_zero_is_deterministic(backend: EmbeddedBackend) -> None:
    first, second = [await generate(backend, "Name a color.", max_output_tokens=8) for _ in range(2)]
    assert first.text == second.text


async def test_sampling_seed_of_a_repeated_turn_depends_on_the_response_id(backend: EmbeddedBackend) -> None:
    turn = make_turn("Tell me a long story.", temperature=2, max_output_tokens=40)
    texts = []
    for response_id, may_be_repeated in (("a", True), ("b", True), ("a", True), ("a", False), ("a", False)):
        repeated = msgspec.structs.replace(turn, response_id=response_id, may_be_repeated=may_be_repeated)
        stream = await backend.stream(repeated)
        texts.append(Answer([delta async for batch in stream for delta in batch]).text)
    a, b, again, *free = texts
    assert again == a
    assert len({a, b, *free}) == 4


async def test_sampling_parameters_are_accepted(backend: EmbeddedBackend) -> None:
    sampling = {"temperature": 1.5, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": 1}
    result = await generate(backend, "Name a color.", max_output_tokens=4, **sampling)
    assert result.text


def count_repeats(text: str) -> int:
    words = text.split()
    return len(words) - len(set(words))


async def test_frequency_penalty_reduces_repetition(backend: EmbeddedBackend) -> None:
    story = "Tell a story about the fox and the fox and the fox."
    plain = await generate(backend, story, max_output_tokens=60)
    penalized = await generate(backend, story, max_output_tokens=60, frequency_penalty=2)
    assert count_repeats(penalized.text) < count_repeats(plain.text)


async def test_usage_counts_prompt_cache_and_output(backend: EmbeddedBackend) -> None:
    turn = make_turn("Name an animal.", max_output_tokens=4)
    read = await backend.count_tokens(turn)
    result, again = await generate_twice(backend, "Name an animal.", max_output_tokens=4)
    assert result.usage.input_tokens == read
    assert result.usage.total_tokens == read + 4
    assert 0 < again.usage.input_tokens_details.cached_tokens < read


async def test_tokens_read_in_slices_do_not_count_as_cached(backend: EmbeddedBackend) -> None:
    text = "The sea is deep. " * 40  # three slices
    first, again = await generate_twice(backend, text, max_output_tokens=1)
    read = first.usage.input_tokens
    assert (read > 150, first.usage.input_tokens_details.cached_tokens < 64) == (True, True)
    assert read - 64 <= again.usage.input_tokens_details.cached_tokens < read


async def test_count_tokens_grows_with_the_text(backend: EmbeddedBackend) -> None:
    one, three = [await backend.count_tokens(make_turn("hello" + " hello" * more)) for more in (0, 2)]
    assert three == one + 2


async def test_too_long_input_is_rejected_with_the_numbers(backend: EmbeddedBackend) -> None:
    turn = make_turn("word " * 1100, max_output_tokens=7)
    length = await backend.count_tokens(turn)
    with pytest.raises(ContextLengthExceeded) as caught:
        await backend.stream(turn)
    assert caught.value.param == "input"
    assert all(number in caught.value.message for number in (str(WINDOW), str(length), "7"))


async def test_answer_that_fills_the_window_finishes_with_length(shallow_weights: Path) -> None:
    backend = EmbeddedBackend(shallow_weights, context=256, slots=1)
    await backend.start()
    try:
        schema = {"type": "array", "items": {"enum": ["again"]}, "minItems": 100}
        form = {"format": {"type": "json_schema", "name": "list", "schema": schema}}
        result = await generate(backend, "word " * 180, text=form)
    finally:
        await backend.close()
    assert (result.usage.total_tokens, result.end) == (256, Finish("length"))


async def test_answer_follows_its_schema(backend: EmbeddedBackend) -> None:
    result = await generate(backend, "Anna is 31 years old.", text=PERSON_FORMAT, max_output_tokens=40)
    assert result.end == Finish("stop")
    jsonschema.validate(json.loads(result.text), PERSON)


async def test_json_object_format_gives_an_object(whole_model: EmbeddedBackend) -> None:
    form = {"format": {"type": "json_object"}}
    result = await generate(whole_model, "Anna is 31 years old.", text=form, max_output_tokens=60)
    assert result.end == Finish("stop")
    assert isinstance(json.loads(result.text), dict)


def check_calls(result: Answer, allowed: set[str]) -> None:
    assert result.end == Finish("stop")
    assert result.text == ""
    assert result.calls
    for name, arguments in result.calls:
        assert name in allowed
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


async def test_required_call_is_made(backend: EmbeddedBackend) -> None:
    result = await generate(backend, "Hello", tools=TOOLS, tool_choice="required", max_output_tokens=300)
    check_calls(result, set(SCHEMAS))


@pytest.mark.parametrize("name", ["get_weather", "roll", "now"])
async def test_named_function_is_called_once(backend: EmbeddedBackend, name: str) -> None:
    choice = {"type": "function", "name": name}
    result = await generate(backend, "Hello", tools=TOOLS, tool_choice=choice, max_output_tokens=60)
    check_calls(result, {name})
    assert len(result.calls) == 1


async def test_only_allowed_tools_are_called(backend: EmbeddedBackend) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "roll"}]}
    result = await generate(backend, "Weather in Paris?", tools=TOOLS, tool_choice=choice, max_output_tokens=300)
    check_calls(result, {"roll"})


async def test_parallel_tool_calls_false_allows_one_call(backend: EmbeddedBackend) -> None:
    result = await generate(
        backend, "Hello", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_output_tokens=60
    )
    check_calls(result, set(SCHEMAS))
    assert len(result.calls) == 1


async def test_tool_choice_none_calls_nothing(backend: EmbeddedBackend) -> None:
    result = await generate(backend, "Weather in Paris?", tools=TOOLS, tool_choice="none", max_output_tokens=8)
    assert result.text
    assert result.calls == []


async def test_tools_with_schema_give_a_call_or_matching_answer(backend: EmbeddedBackend) -> None:
    both = {"tools": TOOLS, "text": PERSON_FORMAT, "parallel_tool_calls": False}
    result = await generate(backend, "Anna is 31 years old.", max_output_tokens=60, **both)
    if result.calls:
        check_calls(result, set(SCHEMAS))
    else:
        jsonschema.validate(json.loads(result.text), PERSON)


async def test_auto_choice_answers_or_calls_as_fits(whole_model: EmbeddedBackend) -> None:
    tools = [function("get_weather", "Get the current weather for a city", city={"type": "string"})]
    question = "What is the weather in Paris?"
    greeted = await generate(whole_model, "Hello!", tools=tools, max_output_tokens=8)
    assert greeted.calls == []
    called = await generate(whole_model, question, tools=tools, max_output_tokens=120)
    read = await whole_model.count_tokens(make_turn(question, tools=tools))
    assert [(name, json.loads(arguments)) for name, arguments in called.calls] == [("get_weather", {"city": "Paris"})]
    assert (called.usage.input_tokens, called.end) == (read, Finish("stop"))
    call = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": '{"city": "Paris"}'}
    result = {"type": "function_call_output", "call_id": "1", "output": "sunny, 21 C"}
    history = [{"role": "user", "content": question}, call, result]
    reported = await generate(whole_model, history, tools=tools, max_output_tokens=16)
    assert "sunny" in reported.text


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema.not"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}},
            "text.format.schema.type",
        ),
        ({"tools": [WEATHER, function("f", "", a={"pattern": "(?!a)b", "type": "string"})]}, "tools[1].parameters"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].type",
        ),
    ],
)
async def test_unsupported_request_is_rejected_before_the_stream(
    backend: EmbeddedBackend, parameters: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await backend.stream(make_turn(**{"input": "Hello", **parameters}))
    assert caught.value.param == param


async def test_characters_of_several_tokens_are_complete(backend: EmbeddedBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "日本語 🎉 é"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    result = await generate(backend, "Hello", text=form, max_output_tokens=60)
    assert json.loads(result.text) == {"a": "日本語 🎉 é"}
    assert not any("\ufffd" in text for text in result.texts)


async def test_logprobs_describe_the_text(backend: EmbeddedBackend) -> None:
    result = await generate(backend, "Name a color.", max_output_tokens=4, top_logprobs=2)
    assert "".join(each.token for each in result.logprobs) == result.text
    assert [len(each.top_logprobs) for each in result.logprobs] == [2] * 4
    # At temperature 0, the chosen token is the most likely one.
    assert all(each.top_logprobs[0].token == each.token and each.logprob <= 0 for each in result.logprobs)
    assert all(bytes(each.bytes).decode() == each.token for each in result.logprobs)


async def test_no_logprobs_by_default(backend: EmbeddedBackend) -> None:
    assert (await generate(backend, "Name a color.", max_output_tokens=2)).logprobs == []


async def test_more_turns_than_slots_do_not_block_the_loop(backend: EmbeddedBackend) -> None:
    turns = [asyncio.create_task(generate(backend, f"Count to {n}.", max_output_tokens=12)) for n in (3, 4, 5, 6)]
    wakeups = 0
    while not all(task.done() for task in turns):
        await asyncio.sleep(0)
        wakeups += 1
    answers = [task.result() for task in turns]
    assert all(each.text for each in answers)
    # A blocked loop would run a few times per token, not thousands of times.
    assert wakeups > 50 * sum(each.usage.output_tokens for each in answers)


async def test_closed_answer_frees_its_slot(backend: EmbeddedBackend) -> None:
    endless = [await backend.stream(make_turn("Count to a million.")) for _ in range(2)]
    for answer in endless:
        await anext(answer)
        await answer.aclose()
    assert (await generate(backend, "Hi", max_output_tokens=2)).text


async def test_cancelled_turn_leaves_the_queue(backend: EmbeddedBackend, go_on: threading.Event) -> None:
    running = [await backend.stream(make_turn("Count to a million.")) for _ in range(2)]
    for answer in running:
        await anext(answer)
    waiting = asyncio.create_task(generate(backend, "Hello"))
    await until_one_waits(backend)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert backend.queue.waiting == 0
    go_on.set()
    for answer in running:
        await answer.aclose()
    assert (await generate(backend, "Hi", max_output_tokens=2)).text


async def test_answer_that_was_not_started_takes_no_slot(backend: EmbeddedBackend) -> None:
    for _ in range(3):
        await (await backend.stream(make_turn("Count to a million."))).aclose()
    assert (await generate(backend, "Hi", max_output_tokens=2)).text


async def test_closing_the_backend_ends_running_and_queued_turns(shallow_weights: Path, go_on: threading.Event) -> None:
    backend = EmbeddedBackend(shallow_weights, context=WINDOW, slots=1)
    await backend.start()
    running = await backend.stream(make_turn("Count to a million."))
    queued = asyncio.ensure_future(backend.stream(make_turn("Count to a million.")))
    await anext(running)
    await until_one_waits(backend)
    closing = asyncio.ensure_future(backend.close())
    with pytest.raises(Unavailable):
        await queued
    go_on.set()
    await closing
    with pytest.raises(Unavailable):
        async for _ in running:
            pass
    with pytest.raises(Unavailable):
        await backend.stream(make_turn("Hello"))


async def test_system_messages_are_read_first(backend: EmbeddedBackend) -> None:
    scattered = [{"role": "user", "content": "Hi"}, {"role": "developer", "content": "Be brief."}]
    ahead = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert await backend.count_tokens(make_turn(scattered)) == await backend.count_tokens(make_turn(ahead))


async def test_invalid_model_file_is_config_error(tmp_path: Any) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    backend = create("local", {"weights": str(tmp_path / "broken.gguf")}, tmp_path)
    with pytest.raises(ConfigError, match=r"broken\.gguf cannot be loaded"):
        await backend.start()


async def test_create_uses_the_configured_options(tmp_path: Any) -> None:
    backend = create("local", {"context": 512}, tmp_path)
    (model,) = backend.models()
    assert (model.id, model.owned_by, model.context_window) == ("smollm2-135m", "local", 512)


async def test_invalid_option_is_named(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"backends\.local\.slots"):
        create("local", {"slots": 0}, tmp_path)
