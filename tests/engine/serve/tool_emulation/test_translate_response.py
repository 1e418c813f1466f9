"""Translation of the deltas of a model that only supports functions."""

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.backends.base import Capabilities, Turn
from antiphon.engine.serve.tool_emulation import translate_calls
from antiphon.engine.serve.tool_emulation.answer_record import TurnBudget
from antiphon.engine.serve.tool_emulation.translate_request import translate_turn
from antiphon.engine.serve.tool_emulation.translate_response import AnswerTranslator
from antiphon.protocol.hosted import WebSearchCall
from antiphon.protocol.json_text import read_json
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.protocol.tools import CustomTool, FunctionTool, NamespaceTool, ShellTool
from antiphon.stream import deltas
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import CustomToolCall, Delta, Finish, Text, ToolCall

NATIVE = Capabilities(tools=frozenset({"function"}), json_schema=True)
TOOLS: list[Any] = [
    FunctionTool("f"),
    CustomTool("c"),
    NamespaceTool("n", "", [FunctionTool("child")]),
    ShellTool(),
]


def raise_(*batches: list[Delta], choice: Any = None) -> list[Delta]:
    request = CreateRequest(tools=TOOLS, tool_choice=choice)
    translator = AnswerTranslator(translate_turn(Turn(request=request, items=[]), NATIVE), TurnBudget())
    return [delta for batch in batches for delta in translator.feed(batch)]


def test_call_is_held_until_its_name_arrives() -> None:
    emitted = raise_([ToolCall(1, '{"input"')], [ToolCall(1, ': "x', "c", "call_1")], [ToolCall(1, '"}')], [Finish()])
    assert emitted == [CustomToolCall(1, "x", "c", "call_1"), Finish()]


def test_interleaved_calls_stay_separate() -> None:
    emitted = raise_(
        [ToolCall(1, '{"a"', "n__child", "call_1"), ToolCall(2, '{"input": "x', "c", "call_2")],
        [ToolCall(1, ":1}"), ToolCall(2, 'y"}'), Finish()],
    )
    assert emitted == [
        ToolCall(1, '{"a"', "child", "call_1", "n"),
        CustomToolCall(2, "x", "c", "call_2"),
        ToolCall(1, ":1}"),
        CustomToolCall(2, "y"),
        Finish(),
    ]


@pytest.mark.parametrize("arguments", ['{"command": "x"}', '"x"', '{"input": "x', "x"])
def test_custom_call_that_its_backend_closes_has_its_text_before_the_end(arguments: str) -> None:
    emitted = raise_([ToolCall(1, arguments, "c", "call_1", has_end=True), deltas.CloseItem(1), Finish()])
    texts = [delta.input for delta in emitted[:-2] if isinstance(delta, CustomToolCall)]
    assert ("".join(texts), emitted[-2:]) == ("x", [deltas.CloseItem(1), Finish()])


@pytest.mark.parametrize(
    "first", [CustomToolCall(1, "x", "c", "call_1"), deltas.OpenItem(1, WebSearchCall(id="ws_1", action=None), "ws")]
)
def test_item_of_a_later_answer_is_closed_under_its_own_key(first: Any) -> None:
    budget = TurnBudget()
    budget.answers = 1
    capabilities = Capabilities(tools=NATIVE.tools | {"custom"}, json_schema=True)
    turn = Turn(request=CreateRequest(tools=TOOLS), items=[])
    translator = AnswerTranslator(translate_turn(turn, capabilities), budget)
    opened, closed = translator.feed([first, deltas.CloseItem(1)])
    assert (opened, closed) == (msgspec.structs.replace(first, key="1 1"), deltas.CloseItem("1 1"))


def test_continued_call_that_was_emitted_is_an_error() -> None:
    shell = ToolCall(1, '{"commands": ["ls"]}', "shell", "call_1")
    text = [shell, Text("Done.")]
    assert raise_(text, [ToolCall(1, "\n"), Finish()]) == raise_(text, [Finish()])
    failure = deltas.Failure("The model continued a closed call.", "model_error", "model_error")
    continued = [*text, ToolCall(1, "{}"), Text("More."), Finish()]
    assert raise_(continued) == raise_(*([delta] for delta in continued)) == [*raise_(text), failure]


def test_incomplete_call_is_parsed_again_only_when_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def read_and_count(text: str) -> Any:
        parsed.append(text)
        return read_json(text)

    monkeypatch.setattr(translate_calls, "read_json", read_and_count)
    fragments = ['{"commands": ["', "x", '"]}']
    calls = [ToolCall(1, fragments[0], "shell"), *(ToolCall(1, each) for each in fragments[1:])]
    emitted = raise_(*([each, *[Text("a")] * 100] for each in calls), [Finish()])
    assert len(emitted) == 3 * 100 + 2
    # The complete call is parsed once more, for its item.
    assert parsed == ["".join(fragments[: count + 1]) for count in (0, 1, 2, 2)]


def test_call_without_a_name_is_emitted() -> None:
    assert raise_([ToolCall(1, "{}")], [Finish()]) == [ToolCall(1, "{}"), Finish()]


def test_other_deltas_pass_unchanged() -> None:
    delta_batches: list[Delta] = [deltas.Reasoning("Hm."), Text("So."), deltas.Failure("No.")]
    assert raise_(delta_batches) == delta_batches


RECEIPT = WebSearchCall("ws_1", {}, "completed")


@pytest.mark.parametrize("run", [deltas.WholeItem(RECEIPT), deltas.OpenItem("ws", RECEIPT)])
def test_hosted_tool_call_satisfies_a_required_call(run: Delta) -> None:
    delta_batches: list[Delta] = [run, Text("So."), Finish()]
    assert raise_(delta_batches, choice="required") == delta_batches


steps = st.lists(
    st.one_of(
        st.builds(Text, st.text("ab", min_size=1, max_size=3)),
        st.builds(
            lambda key, name, text: ToolCall(key, text, name),
            st.integers(0, 3),
            st.sampled_from(["", "f", "c", "n__child", "child", "shell", "none"]),
            st.sampled_from(["", "{", "}", "{}", '{"input": "', 'x"}', '{"commands": ["ls"]}']),
        ),
    ),
    max_size=12,
)


@given(steps)
@example([ToolCall(0, "{}", "f"), ToolCall(1, "", "shell"), ToolCall(0, "", "f")])
def test_any_answer_composes_without_error_however_it_is_batched(delta_batches: list[Delta]) -> None:
    emitted = raise_(*([delta] for delta in delta_batches), [Finish()])
    assert raise_([*delta_batches, Finish()]) == emitted
    numbers = iter(range(1000))
    composer = Composer(
        Response(id="r", created_at=0, model="m"), new_id=lambda kind: f"{kind}_{next(numbers)}", now=int
    )
    composer.compose(emitted)
    assert composer.finished == any(isinstance(delta, Finish | deltas.Failure) for delta in emitted)
