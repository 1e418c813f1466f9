"""Translation of the model's output into deltas."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.embedded.model import CompletionChoice, CompletionChunk, GeneratedToken, Timings, TokenLogprobs
from antiphon.backends.embedded.output import OutputReader
from antiphon.backends.embedded.printed_calls import CallForms
from antiphon.backends.embedded.prompt import write_call, write_custom_call
from antiphon.errors import ModelError
from antiphon.protocol.content import LogProb
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.stream.deltas import CustomToolCall, Delta, Finish, Text, TokenUsage, ToolCall


def read(pieces: list[str], *, may_call: bool = True, reason: str = "stop") -> list[Delta]:
    reader = OutputReader(tools={"f", "g", "c", "open"} if may_call else (), open_ended={"open"})
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.read(CompletionChunk([CompletionChoice(piece)]))
        if reader.finished:
            return deltas
    return deltas + reader.read(CompletionChunk([CompletionChoice("", reason)]))


def join(deltas: list[Delta]) -> tuple[str, list[tuple[str, str]], Delta]:
    calls: dict[Any, tuple[str, str]] = {}
    for delta in deltas:
        if isinstance(delta, ToolCall | CustomToolCall):
            more = delta.arguments if isinstance(delta, ToolCall) else delta.input
            name, known = calls.get(delta.key, ("", ""))
            calls[delta.key] = (name + delta.name, known + more)
    return "".join(delta.text for delta in deltas if isinstance(delta, Text)), list(calls.values()), deltas[-1]


ARGUMENTS = ['{"city": "Paris"}', '{"a": "}{\\"]\\\\", "b": [1, {"c": null}]}', "{}"]
INPUTS = ["", "}\n", 'x\n</tool_cal\n{"name": ', "\n\n</tool_calls", "<tool_call>\n{}"]
functions = st.sampled_from(ARGUMENTS).map(lambda arguments: ("f", arguments, write_call("f", arguments)))
customs = st.sampled_from(INPUTS).map(lambda text: ("c", text, write_custom_call("c", text)))
# An input that ends with the output may contain the end marker of other calls.
open_ended = st.sampled_from(["", "a\n</tool_call>", "\n</tool_call>\n<tool_call>\n"]).map(
    lambda text: ("open", text, write_custom_call("open", text).removesuffix("\n</tool_call>"))
)


@given(st.lists(functions | customs, min_size=1, max_size=4, unique=True), st.lists(open_ended, max_size=1), st.data())
def test_calls_are_found_in_text_cut_anywhere(calls_made: list[Any], last: list[Any], data: st.DataObject) -> None:
    text = "\n".join(written for _, _, written in calls_made + last)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[left:right] for left, right in itertools.pairwise(cuts)]
    assert join(read(pieces)) == ("", [(name, value) for name, value, _ in calls_made + last], Finish("stop"))


@given(st.text(min_size=1).filter(lambda text: not text.startswith("<tool_call>")))
def test_text_is_emitted_unchanged(text: str) -> None:
    assert join(read(list(text))) == (text, [], Finish("stop"))


def test_first_call_is_emitted_while_it_grows() -> None:
    start, end = write_call("f", "|").split("|")
    assert read([start, '{"a": ', "1}", end]) == [
        ToolCall(0, '{"a": ', "f"),
        ToolCall(0, "1}"),
        Finish("stop"),
    ]


def test_possible_end_marker_in_input_is_held_back() -> None:
    start, end = write_custom_call("c", "|").split("|")
    assert read([start, "a", "b\n</tool", "\nc", end[:5], end[5:]]) == [
        CustomToolCall(0, "a", "c"),
        CustomToolCall(0, "b"),
        CustomToolCall(0, "\n</tool\nc"),
        Finish("stop"),
    ]


def test_call_with_empty_input_is_emitted() -> None:
    assert read([write_custom_call("c", "")]) == [CustomToolCall(0, "", "c"), Finish("stop")]


def test_input_ends_at_end_marker_on_the_same_line() -> None:
    assert join(read(['<tool_call>\n{"name": "c"}\n', "a</tool", "_call>"])) == ("", [("c", "a")], Finish("stop"))


def test_input_cut_off_is_emitted_completely() -> None:
    cut = write_custom_call("c", "a").removesuffix("_call>")
    assert join(read([cut], reason="length")) == ("", [("c", "a\n</tool")], Finish("length"))


def test_repeated_call_ends_the_answer() -> None:
    call = write_call("f", '{"a": 1}')
    assert join(read([call, "\n", call, "\n", write_call("g", "{}")])) == ("", [("f", '{"a": 1}')], Finish("stop"))


def test_chunks_after_the_end_of_the_answer_are_not_read() -> None:
    call = write_call("f", '{"a": 1}')
    reader = OutputReader(tools={"f"})
    chunks = [CompletionChunk([CompletionChoice(text)]) for text in (call, "\n", call, "\n", call)]
    assert join(reader.read_all(chunks)) == ("", [("f", '{"a": 1}')], Finish("stop"))
    assert reader.finished


def test_call_cut_off_is_emitted_as_far_as_it_came() -> None:
    first, second = write_call("f", '{"a": 1}'), write_call("f", '{"a": 22')
    cut = second[: second.index("22") + 2]
    assert join(read([first, "\n", cut], reason="length")) == (
        "",
        [("f", '{"a": 1}'), ("f", '{"a": 22')],
        Finish("length"),
    )


def test_call_cut_off_before_its_name_is_dropped() -> None:
    assert read(["<tool_call>\n{"], reason="length") == [Finish("length")]


def test_call_format_is_text_without_tools() -> None:
    assert join(read([write_call("f", "{}")], may_call=False)) == (write_call("f", "{}"), [], Finish("stop"))


def test_call_of_unavailable_tool_is_model_error() -> None:
    with pytest.raises(ModelError, match="called 'h', which is not an available tool"):
        read([write_call("h", "{}")])


def test_usage_comes_from_the_timings() -> None:
    reader = OutputReader(tools=())
    emitted = reader.read(
        CompletionChunk([CompletionChoice("Hi", "length")], Timings(cache_n=5, prompt_n=2, predicted_n=1))
    )
    assert emitted == [Text("Hi"), TokenUsage(Usage(7, 1, 8, InputTokensDetails(5))), Finish("length")]


def test_logprobs_are_emitted_with_their_text() -> None:
    reader = OutputReader(tools={"f"})
    first = reader.read(
        CompletionChunk([CompletionChoice("<", None, TokenLogprobs([GeneratedToken("<", -1.0, [60])]))])
    )
    second = reader.read(
        CompletionChunk([CompletionChoice("b>", None, TokenLogprobs([GeneratedToken("b>", -2.0, [98, 62])]))])
    )
    assert first == []
    assert second == [Text("<b>", (LogProb("<", -1.0, [60], []), LogProb("b>", -2.0, [98, 62], [])))]


def read_printed(pieces: list[str], reason: str = "stop") -> tuple[list[Delta], str | None]:
    reader = OutputReader(tools=(), forms=CallForms(["f", "g"]))
    chunks = [CompletionChunk([CompletionChoice(piece)]) for piece in pieces]
    return reader.read_all([*chunks, CompletionChunk([CompletionChoice("", reason)])]), reader.printed_tool


@pytest.mark.parametrize("text", ['```json\n{"name": "f", "arguments": {}}', '{"name":"f"}', 'f(a="b")'])
def test_printed_call_is_not_emitted_as_text(text: str) -> None:
    assert read_printed(list(text)) == ([], "f")
    assert read_printed([text]) == ([], "f")


def test_text_is_emitted_while_it_grows() -> None:
    deltas, tool = read_printed(["Hel", "lo", "!"])
    assert (deltas, tool) == ([Text("Hel"), Text("lo"), Text("!"), Finish("stop")], None)


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("text", ['{"name": "Ann"}', '```json\n{"name": "h"}', '{"name": "', "```", "f is a tool"])
def test_text_like_a_call_is_emitted_completely(text: str, reason: str) -> None:
    deltas, tool = read_printed(list(text), reason)
    assert (join(deltas)[0], tool) == (text, None)


def test_later_call_in_a_text_is_text() -> None:
    text = 'Here: {"name": "f", "arguments": {}}'
    assert join(read_printed(list(text))[0])[0] == text
