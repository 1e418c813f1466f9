import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.embedded.answer import Answer
from antiphon.backends.embedded.model import Choice, Chunk, Timings, Token, TokenList
from antiphon.backends.embedded.prompt import write_call
from antiphon.protocol.content import LogProb
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.stream.deltas import Delta, Finish, Text, Tokens, ToolCall


def read(pieces: list[str], *, may_call: bool = True, reason: str = "stop") -> list[Delta]:
    answer = Answer(may_call=may_call)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += answer.read(Chunk([Choice(piece)]))
        if answer.finished:
            return deltas
    return deltas + answer.read(Chunk([Choice("", reason)]))


def join(deltas: list[Delta]) -> tuple[str, list[tuple[str, str]], Delta]:
    calls: dict[Any, tuple[str, str]] = {}
    for delta in deltas:
        if isinstance(delta, ToolCall):
            name, arguments = calls.get(delta.key, ("", ""))
            calls[delta.key] = (name + delta.name, arguments + delta.arguments)
    return "".join(delta.text for delta in deltas if isinstance(delta, Text)), list(calls.values()), deltas[-1]


ARGUMENTS = ['{"city": "Paris"}', '{"a": "}{\\"]\\\\", "b": [1, {"c": null}]}', "{}"]


@given(st.lists(st.sampled_from(ARGUMENTS), min_size=1, unique=True), st.data())
def test_calls_are_found_however_the_text_is_cut(made: list[str], data: st.DataObject) -> None:
    text = "\n".join(write_call("f", arguments) for arguments in made)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    assert join(read(pieces)) == ("", [("f", arguments) for arguments in made], Finish("stop"))


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


def test_tokens_are_counted_as_the_model_counts_them() -> None:
    answer = Answer(may_call=False)
    said = answer.read(Chunk([Choice("Hi", "length")], Timings(cache_n=5, prompt_n=2, predicted_n=1)))
    assert said == [Text("Hi"), Tokens(Usage(7, 1, 8, InputTokensDetails(5))), Finish("length")]


def test_logprobs_go_with_the_text_they_describe() -> None:
    answer = Answer(may_call=True)
    held = answer.read(Chunk([Choice("<", None, TokenList([Token("<", -1.0, [60])]))]))
    told = answer.read(Chunk([Choice("b>", None, TokenList([Token("b>", -2.0, [98, 62])]))]))
    assert held == []
    assert told == [Text("<b>", (LogProb("<", -1.0, [60], []), LogProb("b>", -2.0, [98, 62], [])))]
