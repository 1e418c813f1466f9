import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.embedded.model import Choice, Chunk, Timings, Token, TokenList
from antiphon.backends.embedded.output import Answer
from antiphon.backends.embedded.prompt import write_call, write_custom_call
from antiphon.errors import ModelError
from antiphon.protocol.content import LogProb
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.stream.deltas import CustomToolCall, Delta, Finish, Text, TokenUsage, ToolCall


def read(pieces: list[str], *, may_call: bool = True, reason: str = "stop") -> list[Delta]:
    answer = Answer(tools={"f", "g", "c", "open"} if may_call else (), open_ended={"open"})
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += answer.read(Chunk([Choice(piece)]))
        if answer.finished:
            return deltas
    return deltas + answer.read(Chunk([Choice("", reason)]))


def join(deltas: list[Delta]) -> tuple[str, list[tuple[str, str]], Delta]:
    calls: dict[Any, tuple[str, str]] = {}
    for delta in deltas:
        if isinstance(delta, ToolCall | CustomToolCall):
            more = delta.arguments if isinstance(delta, ToolCall) else delta.input
            name, said = calls.get(delta.key, ("", ""))
            calls[delta.key] = (name + delta.name, said + more)
    return "".join(delta.text for delta in deltas if isinstance(delta, Text)), list(calls.values()), deltas[-1]


ARGUMENTS = ['{"city": "Paris"}', '{"a": "}{\\"]\\\\", "b": [1, {"c": null}]}', "{}"]


INPUTS = ["", "}\n", 'x\n</tool_cal\n{"name": ', "\n\n</tool_calls", "<tool_call>\n{}"]
functions = st.sampled_from(ARGUMENTS).map(lambda arguments: ("f", arguments, write_call("f", arguments)))
customs = st.sampled_from(INPUTS).map(lambda text: ("c", text, write_custom_call("c", text)))
# What ends with the answer may hold the very sign that closes other calls.
open_ended = st.sampled_from(["", "a\n</tool_call>", "\n</tool_call>\n<tool_call>\n"]).map(
    lambda text: ("open", text, write_custom_call("open", text).removesuffix("\n</tool_call>"))
)


@given(st.lists(functions | customs, min_size=1, max_size=4, unique=True), st.lists(open_ended, max_size=1), st.data())
def test_calls_are_found_however_the_text_is_cut(made: list[Any], last: list[Any], data: st.DataObject) -> None:
    text = "\n".join(written for _, _, written in made + last)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    assert join(read(pieces)) == ("", [(name, said) for name, said, _ in made + last], Finish("stop"))


@given(st.text(min_size=1).filter(lambda text: not text.startswith("<tool_call>")))
def test_text_stays_as_it_is(text: str) -> None:
    assert join(read(list(text))) == (text, [], Finish("stop"))


def test_the_first_call_goes_out_as_it_grows() -> None:
    opening, closing = write_call("f", "|").split("|")
    assert read([opening, '{"a": ', "1}", closing]) == [
        ToolCall(0, '{"a": ', "f"),
        ToolCall(0, "1}"),
        Finish("stop"),
    ]


def test_an_input_goes_out_as_it_grows_but_not_what_may_be_its_end() -> None:
    opening, closing = write_custom_call("c", "|").split("|")
    assert read([opening, "a", "b\n</tool", "\nc", closing[:5], closing[5:]]) == [
        CustomToolCall(0, "a", "c"),
        CustomToolCall(0, "b"),
        CustomToolCall(0, "\n</tool\nc"),
        Finish("stop"),
    ]


def test_an_empty_input_is_a_call_all_the_same() -> None:
    assert read([write_custom_call("c", "")]) == [CustomToolCall(0, "", "c"), Finish("stop")]


def test_an_input_ends_without_a_line_of_its_own_for_the_end() -> None:
    assert join(read(['<tool_call>\n{"name": "c"}\n', "a</tool", "_call>"])) == ("", [("c", "a")], Finish("stop"))


def test_an_input_cut_off_is_told_to_its_last_letter() -> None:
    cut = write_custom_call("c", "a").removesuffix("_call>")
    assert join(read([cut], reason="length")) == ("", [("c", "a\n</tool")], Finish("length"))


def test_a_call_made_again_ends_the_answer() -> None:
    call = write_call("f", '{"a": 1}')
    assert join(read([call, "\n", call, "\n", write_call("g", "{}")])) == ("", [("f", '{"a": 1}')], Finish("stop"))


def test_calls_cut_off_are_told_as_far_as_they_came() -> None:
    first, second = write_call("f", '{"a": 1}'), write_call("f", '{"a": 22')
    cut = second[: second.index("22") + 2]
    assert join(read([first, "\n", cut], reason="length")) == (
        "",
        [("f", '{"a": 1}'), ("f", '{"a": 22')],
        Finish("length"),
    )


def test_a_call_cut_off_before_its_name_is_not_taken_for_text() -> None:
    assert read(["<tool_call>\n{"], reason="length") == [Finish("length")]


def test_what_looks_like_a_call_is_text_where_none_can_be_made() -> None:
    assert join(read([write_call("f", "{}")], may_call=False)) == (write_call("f", "{}"), [], Finish("stop"))


def test_a_call_that_was_not_offered_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="called 'h', which it was not offered"):
        read([write_call("h", "{}")])


def test_tokens_are_counted_as_the_model_counts_them() -> None:
    answer = Answer(tools=())
    said = answer.read(Chunk([Choice("Hi", "length")], Timings(cache_n=5, prompt_n=2, predicted_n=1)))
    assert said == [Text("Hi"), TokenUsage(Usage(7, 1, 8, InputTokensDetails(5))), Finish("length")]


def test_logprobs_go_with_the_text_they_describe() -> None:
    answer = Answer(tools={"f"})
    held = answer.read(Chunk([Choice("<", None, TokenList([Token("<", -1.0, [60])]))]))
    told = answer.read(Chunk([Choice("b>", None, TokenList([Token("b>", -2.0, [98, 62])]))]))
    assert held == []
    assert told == [Text("<b>", (LogProb("<", -1.0, [60], []), LogProb("b>", -2.0, [98, 62], [])))]
