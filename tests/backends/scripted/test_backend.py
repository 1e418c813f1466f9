"""The scripted backend: answers, rules, errors, gates and cancellation."""

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


def make_backend(script: dict[str, Any] | str | None = None) -> ScriptedBackend:
    return create("demo", {} if script is None else {"script": script}, Path())


def make_turn(*items: Item | Unknown | str, model: str = "scripted", instructions: str | None = None) -> Turn:
    all_items = [Message("user", item) if isinstance(item, str) else item for item in items]
    return Turn(request=CreateRequest(model=model, instructions=instructions), items=all_items)


async def collect_batches(backend: Backend, turn: Turn) -> list[tuple[Delta, ...]]:
    return [tuple(batch) async for batch in await backend.stream(turn)]


async def collect_text(backend: Backend, turn: Turn) -> str:
    batches = await collect_batches(backend, turn)
    return "".join(delta.text for batch in batches for delta in batch if isinstance(delta, Text))


class TestAnswers:
    async def test_default_script_echoes_the_last_user_message(self) -> None:
        backend: Backend = make_backend()
        await backend.start()
        assert await collect_batches(backend, make_turn("Hi", Message("assistant", "What?"), "Guten Tag")) == [
            (Text("You"),),
            (Text(" said:"),),
            (Text(" Guten"),),
            (Text(" Tag"),),
            (TokenUsage(Usage(4, 4, 8)), Finish("stop")),
        ]
        await backend.close()

    async def test_template_contains_number_of_items(self) -> None:
        assert await collect_text(make_backend({"default": "{history} {input}"}), make_turn("a", "b", "c")) == "3 c"

    async def test_same_turn_gets_the_same_answer(self) -> None:
        backend = make_backend({"default": [{"text": "One two"}, {"tool_call": {"name": "f"}}]})
        assert await collect_batches(backend, make_turn("a")) == await collect_batches(backend, make_turn("a"))

    async def test_answer_with_null_finish_has_no_finish(self) -> None:
        assert await collect_batches(
            make_backend({"default": [{"text": ["a"]}, {"finish": None}]}), make_turn("a")
        ) == [(Text("a"),)]

    async def test_models_of_the_script_are_listed(self) -> None:
        assert list(make_backend({"models": ["a", "b"]}).models()) == [
            Model(id="a", created=0, owned_by="demo"),
            Model(id="b", created=0, owned_by="demo"),
        ]

    async def test_count_tokens_counts_words_of_all_items(self) -> None:
        turn = make_turn(
            "one",
            Message("user", [InputText("two"), InputText(" three")]),
            Reasoning([SummaryText("four")]),
            FunctionCall("c", "f", '{"five": 6}'),
            FunctionCallOutput("seven", "c"),
            Unknown(b'{"type":"hologram","text":"none"}'),
            instructions="eight nine",
        )
        assert await make_backend().count_tokens(turn) == 9


class TestRules:
    async def test_first_matching_rule_answers(self) -> None:
        backend = make_backend(
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
        cases = [
            (make_turn("cat", model="big"), "model"),
            (make_turn("cat", output), "last item"),
            (make_turn("a cat"), "user"),
            (make_turn("dog"), "user regex"),
            (make_turn("cat", "dogs"), "default"),
            (make_turn("bird", "dogs"), "text"),
            (make_turn("dogs", instructions="a bird"), "text"),
            (make_turn(output, "fish"), "text regex"),
            (make_turn("fish", model="other"), "default"),
            (make_turn(), "default"),
        ]
        assert [await collect_text(backend, turn) for turn, _ in cases] == [expected for _, expected in cases]

    async def test_rule_gives_answers_in_order_then_repeats_the_last(self) -> None:
        backend = make_backend({"rules": [{"user": "next", "answers": ["1", "2"]}], "default": "-"})
        texts = [await collect_text(backend, make_turn(word)) for word in ("next", "else", "next", "next")]
        assert texts == ["1", "-", "2", "2"]


class TestErrors:
    def read_fields(self, error: AntiphonError) -> dict[str, Any]:
        return {name: getattr(error, name) for name in ("message", "status", "type", "code", "param")}

    async def test_error_before_any_output_is_raised_by_stream(self) -> None:
        backend = make_backend({"default": [{"delay": 0}, {"raise": ERROR}]})
        with pytest.raises(AntiphonError) as raised:
            await backend.stream(make_turn("a"))
        assert self.read_fields(raised.value) == ERROR
        assert backend.cancelled == 0

    @pytest.mark.parametrize("before", [["a"], []])
    async def test_error_after_output_is_raised_by_the_iterator(self, before: list[str]) -> None:
        deltas = await make_backend({"default": [{"text": before}, {"raise": ERROR}]}).stream(make_turn("a"))
        assert [await anext(deltas) for _ in before] == [(Text(word),) for word in before]
        with pytest.raises(AntiphonError) as raised:
            await anext(deltas)
        assert self.read_fields(raised.value) == ERROR

    async def test_crash_is_not_an_antiphon_error(self) -> None:
        deltas = await make_backend({"default": [{"text": ["a"]}, {"crash": "boom"}]}).stream(make_turn("a"))
        await anext(deltas)
        with pytest.raises(RuntimeError, match="boom"):
            await anext(deltas)


class TestGates:
    async def test_turn_waits_at_each_gate_until_released(self) -> None:
        backend = make_backend(TWO_GATES)
        running = asyncio.create_task(collect_text(backend, make_turn("a")))
        await backend.reached("gate")
        backend.release("gate")
        await backend.reached("gate")
        assert not running.done()
        backend.release("gate")
        assert await running == "ab"
        assert backend.cancelled == 0

    async def test_gate_released_in_advance_passes_one_turn(self) -> None:
        backend = make_backend({"default": [{"wait": "gate"}, {"text": "a"}]})
        backend.release("gate")
        assert await collect_text(backend, make_turn("a")) == "a"
        waiting = asyncio.create_task(collect_text(backend, make_turn("a")))
        await backend.reached("gate")
        await backend.reached("gate")
        assert not waiting.done()
        backend.release("gate")
        assert await waiting == "a"

    async def test_unknown_gate_is_an_error(self) -> None:
        with pytest.raises(KeyError):
            make_backend(TWO_GATES).release("gait")


class TestCancellation:
    async def test_cancelled_turn_is_counted(self) -> None:
        backend = make_backend(TWO_GATES)
        running = asyncio.create_task(collect_text(backend, make_turn("a")))
        await backend.reached("gate")
        running.cancel()
        await backend.cancellation.wait()
        assert backend.cancelled == 1
        with pytest.raises(asyncio.CancelledError):
            await running

    async def test_closed_turn_is_counted(self) -> None:
        backend = make_backend()
        deltas = await backend.stream(make_turn("a"))
        await anext(deltas)
        await deltas.aclose()
        assert (backend.cancelled, backend.cancellation.is_set()) == (1, True)

    async def test_turn_cancelled_before_its_error_is_counted(self) -> None:
        backend = make_backend({"default": [{"wait": "gate"}, {"raise": {"message": "no"}}]})
        running = asyncio.create_task(backend.stream(make_turn("a")))
        await backend.reached("gate")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert backend.cancelled == 1

    async def test_turn_closed_after_finish_is_not_counted(self) -> None:
        backend = make_backend()
        deltas = await backend.stream(make_turn("a"))
        async for batch in deltas:
            if isinstance(batch[-1], Finish):
                break
        await deltas.aclose()
        assert (backend.cancelled, backend.cancellation.is_set()) == (0, False)


class TestOptions:
    def test_script_is_read_from_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "script.json"
        file.write_text(json.dumps({"models": ["from-file"]}))
        assert make_backend(str(file)).models()[0].id == "from-file"

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
    def test_invalid_file_is_reported_with_path(self, tmp_path: Path, content: str, message: str) -> None:
        file = tmp_path / "script.json"
        file.write_text(content)
        with pytest.raises(ConfigError) as raised:
            make_backend(str(file))
        assert raised.value.message == f"backends.demo.script ({file}){message}"

    def test_invalid_script_option_is_reported_with_path(self) -> None:
        with pytest.raises(ConfigError) as raised:
            make_backend({"default": [{"item": {"type": "message", "role": "assistant", "content": 3}}]})
        assert raised.value.message == "backends.demo.script.default[0].item.content: Expected str | array, got int"

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as raised:
            make_backend(str(tmp_path / "none.json"))
        assert raised.value.message == f"backends.demo.script ({tmp_path / 'none.json'}): No such file or directory"


async def test_example_script_calls_a_tool_and_uses_its_output() -> None:
    backend = make_backend(str(EXAMPLE))
    called = await collect_batches(backend, make_turn("How is the weather in Bern?"))
    assert [delta for batch in called for delta in batch if isinstance(delta, ToolCall)] == [
        ToolCall("step 2", '{"city":', "get_weather", "call_weather"),
        ToolCall("step 2", '"Bern"}'),
    ]
    call = FunctionCall("call_weather", "get_weather", '{"city":"Bern"}')
    output = FunctionCallOutput("18 degrees", "call_weather")
    followed = await collect_text(backend, make_turn("How is the weather in Bern?", call, output))
    assert followed == "It is 18 degrees and sunny in Bern."


def test_script_can_limit_capabilities() -> None:
    capabilities = make_backend(
        {"native_tools": ["function", "custom"], "lacks": ["json_schema", "images"]}
    ).capabilities
    assert capabilities == msgspec.structs.replace(
        ALL_CAPABILITIES, tools=frozenset({"function", "custom"}), any_tool=False, json_schema=False, images=False
    )
    assert make_backend().capabilities == ALL_CAPABILITIES


def test_unknown_capability_in_lacks_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"lacks\[0\]"):
        make_backend({"lacks": ["patience"]})
