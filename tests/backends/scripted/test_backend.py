import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.backends.base import ALL_CAPABILITIES, Backend, Model, Turn
from antiphon.backends.scripted.backend import ScriptedBackend, create
from antiphon.errors import AntiphonError, ConfigError
from antiphon.protocol.content import InputText, SummaryText
from antiphon.protocol.items import FunctionCall, FunctionCallOutput, Item, Message, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Delta, Finish, Text, TokenUsage, ToolCall

EXAMPLE = Path(__file__).parents[3] / "examples" / "scripted.json"
ERROR = {"message": "Too fast.", "status": 429, "type": "rate_limit_error", "code": "rate", "param": "input"}
TWO_GATES = {"default": [{"text": ["a"]}, {"wait": "gate"}, {"text": ["b"]}, {"wait": "gate"}]}


def make(script: dict[str, Any] | str | None = None) -> ScriptedBackend:
    return create("demo", {} if script is None else {"script": script}, Path())


def turn(*items: Item | Unknown | str, model: str = "scripted", instructions: str | None = None) -> Turn:
    read = [Message("user", item) if isinstance(item, str) else item for item in items]
    return Turn(request=CreateRequest(model=model, instructions=instructions), items=read)


async def answer(backend: Backend, asked: Turn) -> list[tuple[Delta, ...]]:
    return [tuple(batch) async for batch in await backend.stream(asked)]


async def text(backend: Backend, asked: Turn) -> str:
    batches = await answer(backend, asked)
    return "".join(delta.text for batch in batches for delta in batch if isinstance(delta, Text))


class TestAnswers:
    async def test_without_a_script_the_last_user_message_is_echoed(self) -> None:
        backend: Backend = make()
        await backend.start()
        assert await answer(backend, turn("Hi", Message("assistant", "What?"), "Guten Tag")) == [
            (Text("You"),),
            (Text(" said:"),),
            (Text(" Guten"),),
            (Text(" Tag"),),
            (TokenUsage(Usage(4, 4, 8)), Finish("stop")),
        ]
        await backend.close()

    async def test_a_template_may_tell_how_many_items_were_read(self) -> None:
        assert await text(make({"default": "{history} {input}"}), turn("a", "b", "c")) == "3 c"

    async def test_the_same_turn_gets_the_same_answer(self) -> None:
        backend = make({"default": [{"text": "One two"}, {"tool_call": {"name": "f"}}]})
        assert await answer(backend, turn("a")) == await answer(backend, turn("a"))

    async def test_an_answer_without_finish_just_ends(self) -> None:
        assert await answer(make({"default": [{"text": ["a"]}, {"finish": None}]}), turn("a")) == [(Text("a"),)]

    async def test_the_models_of_the_script_are_served(self) -> None:
        assert list(make({"models": ["a", "b"]}).models()) == [
            Model(id="a", created=0, owned_by="demo"),
            Model(id="b", created=0, owned_by="demo"),
        ]

    async def test_words_of_all_that_is_read_are_counted(self) -> None:
        asked = turn(
            "one",
            Message("user", [InputText("two"), InputText(" three")]),
            Reasoning([SummaryText("four")]),
            FunctionCall("c", "f", '{"five": 6}'),
            FunctionCallOutput("seven", "c"),
            Unknown(b'{"type":"hologram","text":"none"}'),
            instructions="eight nine",
        )
        assert await make().count_tokens(asked) == 9


class TestRules:
    async def test_the_first_rule_that_fits_answers(self) -> None:
        backend = make(
            {
                "rules": [
                    {"model": "big", "answers": ["model"]},
                    {"last_item": "function_call_output", "answers": ["last item"]},
                    {"user": "cat", "answers": ["user"]},
                    {"user": {"regex": "^d.g$"}, "answers": ["user regex"]},
                    {"text": "bird", "answers": ["text"]},
                    {"text": {"regex": "f.sh"}, "model": "scripted", "answers": ["text regex"]},
                ],
                "default": "default",
            }
        )
        output = FunctionCallOutput("cat", "c")
        asked = [
            (turn("cat", model="big"), "model"),
            (turn("cat", output), "last item"),
            (turn("a cat"), "user"),
            (turn("dog"), "user regex"),
            (turn("cat", "dogs"), "default"),
            (turn("bird", "dogs"), "text"),
            (turn("dogs", instructions="a bird"), "text"),
            (turn(output, "fish"), "text regex"),
            (turn("fish", model="other"), "default"),
            (turn(), "default"),
        ]
        assert [await text(backend, each) for each, _ in asked] == [expected for _, expected in asked]

    async def test_a_rule_gives_its_answers_in_order_and_then_the_last_again(self) -> None:
        backend = make({"rules": [{"user": "next", "answers": ["1", "2"]}], "default": "-"})
        said = [await text(backend, turn(word)) for word in ("next", "else", "next", "next")]
        assert said == ["1", "-", "2", "2"]


class TestErrors:
    def wire(self, error: AntiphonError) -> dict[str, Any]:
        return {name: getattr(error, name) for name in ("message", "status", "type", "code", "param")}

    async def test_an_error_before_all_speech_is_raised_by_stream(self) -> None:
        backend = make({"default": [{"delay": 0}, {"raise": ERROR}]})
        with pytest.raises(AntiphonError) as raised:
            await backend.stream(turn("a"))
        assert self.wire(raised.value) == ERROR
        assert backend.cancelled == 0

    @pytest.mark.parametrize("before", [["a"], []])
    async def test_an_error_after_speech_is_raised_by_the_stream(self, before: list[str]) -> None:
        deltas = await make({"default": [{"text": before}, {"raise": ERROR}]}).stream(turn("a"))
        assert [await anext(deltas) for _ in before] == [(Text(word),) for word in before]
        with pytest.raises(AntiphonError) as raised:
            await anext(deltas)
        assert self.wire(raised.value) == ERROR

    async def test_a_crash_is_no_error_of_ours(self) -> None:
        deltas = await make({"default": [{"text": ["a"]}, {"crash": "boom"}]}).stream(turn("a"))
        await anext(deltas)
        with pytest.raises(RuntimeError, match="boom"):
            await anext(deltas)


class TestGates:
    async def test_a_turn_waits_at_each_gate_until_it_is_released(self) -> None:
        backend = make(TWO_GATES)
        running = asyncio.create_task(text(backend, turn("a")))
        await backend.reached("gate")
        backend.release("gate")
        await backend.reached("gate")
        assert not running.done()
        backend.release("gate")
        assert await running == "ab"
        assert backend.cancelled == 0

    async def test_a_gate_may_be_released_beforehand_and_lets_one_turn_through(self) -> None:
        backend = make({"default": [{"wait": "gate"}, {"text": "a"}]})
        backend.release("gate")
        assert await text(backend, turn("a")) == "a"
        waiting = asyncio.create_task(text(backend, turn("a")))
        await backend.reached("gate")
        await backend.reached("gate")
        assert not waiting.done()
        backend.release("gate")
        assert await waiting == "a"

    async def test_a_gate_that_is_in_no_answer_is_an_error(self) -> None:
        with pytest.raises(KeyError):
            make(TWO_GATES).release("gait")


class TestCancellation:
    async def test_a_cancelled_turn_is_counted(self) -> None:
        backend = make(TWO_GATES)
        running = asyncio.create_task(text(backend, turn("a")))
        await backend.reached("gate")
        running.cancel()
        await backend.cancellation.wait()
        assert backend.cancelled == 1
        with pytest.raises(asyncio.CancelledError):
            await running

    async def test_a_closed_turn_is_counted(self) -> None:
        backend = make()
        deltas = await backend.stream(turn("a"))
        await anext(deltas)
        await deltas.aclose()
        assert (backend.cancelled, backend.cancellation.is_set()) == (1, True)

    async def test_a_turn_that_is_cancelled_before_its_error_is_counted(self) -> None:
        backend = make({"default": [{"wait": "gate"}, {"raise": {"message": "no"}}]})
        running = asyncio.create_task(backend.stream(turn("a")))
        await backend.reached("gate")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert backend.cancelled == 1

    async def test_a_turn_closed_after_its_finish_is_not_counted(self) -> None:
        backend = make()
        deltas = await backend.stream(turn("a"))
        async for batch in deltas:
            if isinstance(batch[-1], Finish):
                break
        await deltas.aclose()
        assert (backend.cancelled, backend.cancellation.is_set()) == (0, False)


class TestOptions:
    def test_a_script_may_be_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "script.json"
        file.write_text(json.dumps({"models": ["from-file"]}))
        assert make(str(file)).models()[0].id == "from-file"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"default": [{"text": 1}]}', ".default[0].text: Expected str | array, got int"),
            (
                '{"rules": [{"answers": ["a", [{"finish": null}, {"delay": 1}]]}]}',
                ".rules[0].answers[1][1]: Nothing may follow finish",
            ),
            ('{"default": ', ": not valid JSON: Input data was truncated"),
            ("[]", ": Expected object, got array"),
        ],
    )
    def test_a_mistake_in_a_file_is_named_with_its_place(self, tmp_path: Path, content: str, message: str) -> None:
        file = tmp_path / "script.json"
        file.write_text(content)
        with pytest.raises(ConfigError) as raised:
            make(str(file))
        assert raised.value.message == f"backends.demo.script ({file}){message}"

    def test_a_mistake_in_the_options_is_named_with_its_place(self) -> None:
        with pytest.raises(ConfigError) as raised:
            make({"default": [{"item": {"type": "message", "role": "assistant", "content": 3}}]})
        assert raised.value.message == "backends.demo.script.default[0].item.content: Expected str | array, got int"

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as raised:
            make(str(tmp_path / "none.json"))
        assert raised.value.message == f"backends.demo.script ({tmp_path / 'none.json'}): No such file or directory"


async def test_the_example_script_calls_a_tool_and_uses_its_output() -> None:
    backend = make(str(EXAMPLE))
    called = await answer(backend, turn("How is the weather in Bern?"))
    assert [delta for batch in called for delta in batch if isinstance(delta, ToolCall)] == [
        ToolCall("step 2", '{"city":', "get_weather", "call_weather"),
        ToolCall("step 2", '"Bern"}'),
    ]
    call = FunctionCall("call_weather", "get_weather", '{"city":"Bern"}')
    output = FunctionCallOutput("18 degrees", "call_weather")
    followed = await text(backend, turn("How is the weather in Bern?", call, output))
    assert followed == "It is 18 degrees and sunny in Bern."


def test_a_script_may_say_what_its_model_cannot_do() -> None:
    capabilities = make({"native_tools": ["function", "custom"], "lacks": ["json_schema", "images"]}).capabilities
    assert capabilities == msgspec.structs.replace(
        ALL_CAPABILITIES, tools=frozenset({"function", "custom"}), any_tool=False, json_schema=False, images=False
    )
    assert make().capabilities == ALL_CAPABILITIES


def test_a_model_cannot_lack_what_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"lacks\[0\]"):
        make({"lacks": ["patience"]})
