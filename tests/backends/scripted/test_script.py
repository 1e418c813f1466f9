"""Translation of scripts into actions and deltas, and errors in scripts."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError

from antiphon.backends.scripted.script import Action, CompiledAnswer, Delay, Script, Template, Wait
from antiphon.protocol.content import FilePath, LogProb
from antiphon.protocol.items import FunctionCall
from antiphon.protocol.response import OutputTokensDetails, Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import (
    Annotate,
    CustomToolCall,
    Delta,
    Failure,
    Finish,
    Passthrough,
    Reasoning,
    ReasoningSeal,
    ReasoningSummary,
    Refusal,
    Text,
    TokenUsage,
    ToolCall,
    WholeItem,
)

VALUES = {"input": "Guten Tag", "history": "3"}


def compile_answer(answer: Any) -> CompiledAnswer:
    script = msgspec.json.decode(msgspec.json.encode({"default": answer}), type=Script)
    return CompiledAnswer(script.default)


def make_batches(*deltas: Delta) -> list[Action]:
    return [(delta,) for delta in deltas]


def make_usage(*, inputs: int = 0, outputs: int = 0, reasoning: int = 0) -> TokenUsage:
    return TokenUsage(Usage(inputs, outputs, inputs + outputs, output_tokens_details=OutputTokensDetails(reasoning)))


@pytest.mark.parametrize(
    ("steps", "emitted"),
    [
        ([{"text": "Hello  world.\n"}], [Text("Hello"), Text("  world."), Text("\n")]),
        ([{"text": ["He", "llo", ""]}], [Text("He"), Text("llo"), Text("")]),
        ([{"text": ""}, {"text": []}], []),
        ([{"text": '{"input": 1}'}], [Text('{"input":'), Text(" 1}")]),
        ([{"reasoning": "Let me see"}], [Reasoning("Let"), Reasoning(" me"), Reasoning(" see")]),
        ([{"refusal": ["I ", "can't"]}], [Refusal("I "), Refusal("can't")]),
        ([{"summary": "One two"}], [ReasoningSummary("One"), ReasoningSummary(" two")]),
        ([{"summary": ["One", "Two"]}], [ReasoningSummary("One", 0), ReasoningSummary("Two", 1)]),
        ([{"seal": "opaque"}], [ReasoningSeal("opaque")]),
        (
            [{"tokens": [{"token": "Hi", "logprob": -0.5, "top_logprobs": []}, {"token": "!", "logprob": -1}]}],
            [Text("Hi", (LogProb("Hi", -0.5),)), Text("!", (LogProb("!", -1.0),))],
        ),
        (
            [
                {"annotation": {"type": "file_path", "file_id": "f", "index": 0}},
                {"annotation": {"type": "new", "n": 1}},
            ],
            [Annotate(FilePath("f", 0)), Annotate(Unknown(b'{"type":"new","n":1}'))],
        ),
        (
            [{"tool_call": {"name": "a", "arguments": {"x": [1, "ü"]}}}, {"tool_call": {"name": "b", "call_id": "c"}}],
            [ToolCall("step 0", '{"x":[1,"ü"]}', "a"), ToolCall("step 1", "", "b", "c")],
        ),
        (
            [
                {"tool_call": {"key": 0, "name": "a", "namespace": "n", "arguments": ["{", '"x"']}},
                {"tool_call": {"key": 1, "name": "b", "arguments": "{}"}},
                {"tool_call": {"key": 0, "arguments": ":1}"}},
            ],
            [
                ToolCall(0, "{", "a", None, "n"),
                ToolCall(0, '"x"'),
                ToolCall(1, "{}", "b"),
                ToolCall(0, ":1}"),
            ],
        ),
        (
            [{"custom_tool_call": {"name": "sh", "input": ["ls", " -l"], "call_id": "c"}}],
            [CustomToolCall("step 0", "ls", "sh", "c"), CustomToolCall("step 0", " -l")],
        ),
        (
            [
                {
                    "item": {
                        "type": "function_call",
                        "call_id": "c",
                        "name": "f",
                        "arguments": "{}",
                        "status": "completed",
                    }
                }
            ],
            [WholeItem(FunctionCall("c", "f", "{}", status="completed"))],
        ),
        ([{"item": {"type": "hologram", "x": 1}}], [WholeItem(Unknown(b'{"type":"hologram","x":1}'))]),
        ([{"event": {"type": "vendor.news"}}], [Passthrough(Unknown(b'{"type":"vendor.news"}'))]),
    ],
)
def test_steps_become_batches_of_one_delta(steps: list[Any], emitted: list[Delta]) -> None:
    assert compile_answer(steps).actions == make_batches(*emitted)


def test_pauses_stay_in_order() -> None:
    steps = [{"delay": 0.5}, {"text": ["Hi"]}, {"wait": "gate"}]
    assert compile_answer(steps).actions == [Delay(0.5), (Text("Hi"),), Wait("gate")]


def test_string_answer_becomes_text() -> None:
    assert compile_answer("Hi there").actions == make_batches(Text("Hi"), Text(" there"))


class TestTemplates:
    @pytest.mark.parametrize(
        ("text", "filled"),
        [
            ("You: {input} ({history})", ["You:", " Guten", " Tag", " (3)"]),
            (["<{input}>", "{history}", "{other}"], ["<Guten Tag>", "3", "{other}"]),
        ],
    )
    def test_placeholders_are_filled_before_splitting(self, text: Any, filled: list[str]) -> None:
        (template,) = compile_answer([{"text": text}]).actions
        assert isinstance(template, Template)
        assert template.fill(VALUES) == [Text(chunk) for chunk in filled]

    def test_filled_text_is_not_filled_again(self) -> None:
        assert Template("{input}").fill({"input": "{history}", "history": "3"}) == [Text("{history}")]


class TestEndings:
    @pytest.mark.parametrize(
        ("steps", "last"),
        [
            ([{"text": "a b"}], (make_usage(inputs=4, outputs=2), Finish("stop"))),
            ([{"text": "a b"}, {"finish": "length"}], (make_usage(inputs=4, outputs=2), Finish("length"))),
            ([{"finish": "content_filter"}], (make_usage(inputs=4), Finish("content_filter"))),
            ([{"text": "a b"}, {"finish": None}], ()),
            ([{"raise": {"message": "no"}}], ()),
            ([{"failure": {"message": "no"}}], (Failure("no"),)),
            (
                [{"failure": {"message": "no", "code": "c", "type": "t", "param": "p"}}],
                (Failure("no", "c", "t", "p"),),
            ),
            ([{"usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}}], (Finish("stop"),)),
        ],
    )
    def test_answer_ends_as_scripted(self, steps: list[Any], last: tuple[Delta, ...]) -> None:
        assert compile_answer(steps).make_last_batch(lambda: 4, 0) == last

    def test_scripted_usage_stays_in_order(self) -> None:
        given = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
        assert compile_answer([{"usage": given}, {"text": "a"}]).actions == make_batches(
            TokenUsage(Usage(1, 2, 3)), Text("a")
        )

    def test_output_words_are_counted_with_reasoning_separately(self) -> None:
        steps = [
            {"reasoning": "one two"},
            {"summary": "three"},
            {"text": ["fo", "ur fi", "ve"]},
            {"tool_call": {"name": "f", "arguments": '{"six": 7}'}},
            {"custom_tool_call": {"name": "g", "input": "eight"}},
            {"refusal": "nine"},
            {"item": {"type": "hologram"}},
        ]
        assert compile_answer(steps).make_last_batch(lambda: 0, 10) == (make_usage(outputs=19, reasoning=3), Finish())

    @pytest.mark.parametrize(
        ("before", "fails_at_start"),
        [([], True), ([{"delay": 1}, {"wait": "w"}], True), ([{"text": []}], False), ([{"text": "a"}], False)],
    )
    def test_error_before_any_output_fails_at_start(self, before: list[Any], fails_at_start: bool) -> None:
        assert compile_answer([*before, {"raise": {"message": "no"}}]).fails_at_start is fails_at_start
        assert compile_answer([*before, {"crash": "no"}]).fails_at_start is fails_at_start
        assert not compile_answer([*before, {"failure": {"message": "no"}}]).fails_at_start


class TestMistakes:
    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ({"rule": []}, "Object contains unknown field `rule`"),
            ({"models": []}, "Expected `array` of length >= 1 - at `$.models`"),
            ({"rules": [{}]}, "Object missing required field `answers` - at `$.rules[0]`"),
            ({"rules": [{"answers": []}]}, "Expected `array` of length >= 1 - at `$.rules[0].answers`"),
            (
                {"rules": [{"answers": ["a"], "user": {"regex": "("}}]},
                "Invalid regex: missing ), unterminated subpattern at position 0 - at `$.regex` - at `$.rules[0].user`",
            ),
            ({"default": [{"text": 3}]}, "Expected `str | array`, got `int` - at `$.default[0].text`"),
            ({"default": [{}]}, "Expected one key in a step, got none - at `$.default[0]`"),
            (
                {"default": [{"text": "a", "delay": 1}]},
                "Expected one key in a step, got text, delay - at `$.default[0]`",
            ),
            ({"default": [{"delay": -1}]}, "Expected `float` >= 0.0 - at `$.default[0].delay`"),
            ({"default": [{"finish": "bored"}]}, "Invalid enum value 'bored' - at `$.default[0].finish`"),
            (
                {"default": [{"raise": {"message": "m", "status": 200}}]},
                "Expected `int` >= 400 - at `$.default[0].raise.status`",
            ),
        ],
    )
    def test_invalid_script_is_reported_with_path(self, script: Any, message: str) -> None:
        with pytest.raises(ValidationError) as raised:
            msgspec.json.decode(msgspec.json.encode(script), type=Script)
        assert str(raised.value) == message

    @pytest.mark.parametrize(
        ("steps", "message"),
        [
            ([{"finish": "stop"}, {"text": "a"}], "Nothing may follow finish - at `$[1]`"),
            ([{"raise": {"message": "m"}}, {"finish": None}], "Nothing may follow raise - at `$[1]`"),
            ([{"tool_call": {"key": 1}}], "Object missing required field `name` - at `$[0].tool_call`"),
            (
                [{"item": {"type": "item_reference", "id": "i"}}],
                "Expected an output item, got item_reference - at `$[0].item`",
            ),
            ([{"item": {"type": "function_call"}}], "Object missing required field `call_id` - at `$[0].item`"),
            ([{"event": {"n": 1}}], "Object missing required field `type` - at `$[0].event`"),
            ([{"event": 1}], "Object missing required field `type` - at `$[0].event`"),
            ([{"annotation": {}}], "Object missing required field `type` - at `$[0].annotation`"),
        ],
    )
    def test_invalid_answer_is_reported_with_path(self, steps: list[Any], message: str) -> None:
        with pytest.raises(ValidationError) as raised:
            compile_answer(steps)
        assert str(raised.value) == message


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{")))
def test_text_split_into_words_is_complete(text: str) -> None:
    emitted = [action[0] for action in compile_answer(text).actions if isinstance(action, tuple)]
    assert "".join(delta.text for delta in emitted if isinstance(delta, Text)) == text
