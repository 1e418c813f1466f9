"""The emulator as a backend around another backend."""

from typing import Any

import msgspec
import pytest

from antiphon.backends.base import Capabilities, Turn
from antiphon.backends.scripted.backend import Script, ScriptedBackend
from antiphon.engine.serve.tool_emulation.emulator import Emulator, add_emulated_capabilities
from antiphon.protocol import codec
from antiphon.protocol.items import FunctionCall, Message
from antiphon.protocol.request import CreateRequest
from support.tool_emulation import call

FUNCTIONS = Capabilities(tools=frozenset({"function"}))
F = {"type": "function", "name": "f"}
C = {"type": "custom", "name": "c"}


def make(**script: Any) -> ScriptedBackend:
    return ScriptedBackend("test", msgspec.convert({"native_tools": ["function"]} | script, Script))


def turn(*items: Any, **fields: Any) -> Turn:
    request: CreateRequest = codec.decode_request(codec.encode({"model": "scripted"} | fields)).body
    return Turn(request=request, items=list(items))


@pytest.mark.parametrize(
    "plain",
    [
        turn(Message("user", "hi")),
        turn(tools=[F], tool_choice="auto"),
        turn(FunctionCall("c", "f", "{}"), tools=[F], parallel_tool_calls=True),
        turn(text={"format": {"type": "json_object"}}),
    ],
)
async def test_turn_without_emulation_goes_to_the_backend_unchanged(plain: Turn) -> None:
    answer = await Emulator(make()).stream(plain)
    assert answer.__qualname__ == "ScriptedBackend._stream_answer"  # type: ignore[attr-defined]  # a generator has one


async def test_closing_stops_the_model() -> None:
    backend = make(default=[{"text": "One two three"}, {"wait": "gate"}])
    answer = await Emulator(backend).stream(turn(tools=[C]))
    await anext(answer)
    await answer.aclose()
    assert backend.cancelled == 1


async def test_refused_turn_raises_before_the_first_delta() -> None:
    backend = make(default=[{"raise": {"message": "Too much.", "status": 429}}])
    with pytest.raises(Exception, match="Too much"):
        await Emulator(backend).stream(turn(tools=[C]))


async def test_count_tokens_counts_the_translated_turn() -> None:
    call_item = codec.decode_request(
        codec.encode({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "c", "input": "one two"}]})
    ).body.input
    assert isinstance(call_item, list)
    assert await Emulator(make()).count_tokens(turn(*call_item)) == 2


def test_backend_with_functions_supports_all_client_tools() -> None:
    assert add_emulated_capabilities(FUNCTIONS) == Capabilities(
        tools=frozenset(
            {
                "function",
                "custom",
                "namespace",
                "tool_search",
                "local_shell",
                "shell",
                "apply_patch",
                "computer",
                "computer_use_preview",
            }
        ),
        json_schema=True,
    )
    assert add_emulated_capabilities(Capabilities()) == Capabilities(json_schema=True)


def test_emulated_features_produce_warnings() -> None:
    request = turn(
        tools=[F, C, {"type": "namespace", "name": "n", "description": "d", "tools": [F]}, {"type": "shell"}],
        text={"format": {"type": "json_object"}},
    ).request
    assert Emulator(make(lacks=["json_schema"])).describe_emulation(request) == [
        "text.format: sent to the model as an instruction, and the answer is checked",
        "tools: emulated by functions: custom, namespace, shell",
    ]
    assert Emulator(make(native_tools=None)).describe_emulation(request) == []


async def test_background_response_is_emulated_too(emulate: Any) -> None:
    harness = await emulate(call("c", {"input": "x"}))
    answer = await harness.ask(tools=[C], background=True)
    assert [item["type"] for item in answer.output] == ["custom_tool_call"]
