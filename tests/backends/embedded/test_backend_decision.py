"""The decision step on llama.cpp. Asserts the form of the output, not the model's judgement."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from antiphon.backends.base import Turn
from antiphon.backends.embedded import decision as decision_module
from antiphon.backends.embedded.backend import EmbeddedBackend
from antiphon.backends.embedded.decision import CallDecision, OutputRequest
from antiphon.backends.embedded.output import OutputReader
from antiphon.backends.embedded.printed_calls import CallForms
from antiphon.protocol import codec
from antiphon.protocol.items import Message
from antiphon.stream.deltas import Delta, Finish, Text, TokenUsage, ToolCall

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "description": "Get the weather", "parameters": PARAMETERS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(shallow_weights: Path) -> AsyncIterator[EmbeddedBackend]:
    backend = EmbeddedBackend(shallow_weights, context=512, slots=1, batch=256, tool_examples=False)
    await backend.start()
    yield backend
    await backend.close()


def make_turn(input: str, **parameters: Any) -> Turn:
    body = {"model": "m", "input": input, "tools": [WEATHER], "temperature": 0, "max_output_tokens": 40, **parameters}
    request = codec.decode_request(json.dumps(body).encode()).body
    return Turn(request=request, items=[Message("user", input)])


async def generate(backend: EmbeddedBackend, turn: Turn) -> list[Delta]:
    return [delta async for batch in await backend.stream(turn) for delta in batch]


def force(monkeypatch: pytest.MonkeyPatch, margin: float) -> None:
    monkeypatch.setattr(decision_module, "compute_call_margin", lambda *_, **__: margin)


def read_calls(deltas: list[Delta]) -> list[tuple[str, Any]]:
    calls = [delta for delta in deltas if isinstance(delta, ToolCall)]
    texts = {key: "".join(call.arguments for call in calls if call.key == key) for key in {each.key for each in calls}}
    return [("".join(call.name for call in calls if call.key == key), json.loads(text)) for key, text in texts.items()]


async def test_decision_for_a_call_gives_a_valid_call(
    backend: EmbeddedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, 9.0)
    deltas = await generate(backend, make_turn("Hello!", parallel_tool_calls=False))
    ((name, arguments),) = read_calls(deltas)
    assert (name, deltas[-1]) == ("get_weather", Finish("stop"))
    jsonschema.validate(arguments, PARAMETERS)
    assert not any(isinstance(delta, Text) for delta in deltas)


async def test_decision_for_a_text_streams_it(backend: EmbeddedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, -9.0)
    turn = make_turn("What is the weather in Paris?")
    deltas = await generate(backend, turn)
    assert len([delta for delta in deltas if isinstance(delta, Text)]) > 1
    assert read_calls(deltas) == []
    (usage,) = [delta.usage for delta in deltas if isinstance(delta, TokenUsage)]
    assert usage.input_tokens == await backend.count_tokens(turn)
    assert usage.input_tokens_details.cached_tokens < usage.input_tokens


async def test_printed_call_becomes_a_valid_call(backend: EmbeddedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def print_call(decision: CallDecision, _: Any) -> OutputRequest:
        printed = 'start: "```json\\n{\\"name\\": \\"get_weather\\", \\"arguments\\": {\\"town\\": 1}}"'
        body = decision._body | {"grammar": f"%llguidance {{}}\n{printed}\n"}
        return OutputRequest(body, OutputReader(tools=(), forms=CallForms(["get_weather"])))

    monkeypatch.setattr(CallDecision, "decide", print_call)
    deltas = await generate(backend, make_turn("Weather in Oslo?", parallel_tool_calls=False))
    ((name, arguments),) = read_calls(deltas)
    assert (name, deltas[-1]) == ("get_weather", Finish("stop"))
    jsonschema.validate(arguments, PARAMETERS)
    assert not any(isinstance(delta, Text) for delta in deltas)


@pytest.mark.parametrize("deltas_before_close", [0, 1])
async def test_closed_answer_frees_its_slot(backend: EmbeddedBackend, deltas_before_close: int) -> None:
    for _ in range(2):
        answer = await backend.stream(make_turn("Hello!"))
        for _ in range(deltas_before_close):
            await anext(answer)
        await answer.aclose()
    assert await generate(backend, make_turn("Hello!", tool_choice="none", max_output_tokens=2))


async def test_decision_is_the_same_each_time(backend: EmbeddedBackend) -> None:
    first, second = [await generate(backend, make_turn("Oslo?", max_output_tokens=12)) for _ in range(2)]
    kinds = [[type(delta) for delta in each if not isinstance(delta, TokenUsage)] for each in (first, second)]
    assert kinds[0] == kinds[1]
