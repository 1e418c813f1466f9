"""Continue an interrupted stream with a second run of the model."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.protocol.content import LogProb, extract_text
from antiphon.protocol.hosted import ShellAction, ShellCall, ShellCallOutput, ShellOutput
from antiphon.protocol.items import Compaction
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.decompose import decompose_events
from antiphon.stream.fold import fold
from antiphon.stream.replay import Diverged, ReplayFilter
from support.composing import compose_replay, new_replay_composer
from support.turns import turns

SEARCHING = Unknown(b'{"type":"web_search_call","id":"ws_1"}')


LOGPROBS = (LogProb("x", -1.0, [120]),)


def _is_plain(turn: list[d.Delta]) -> bool:
    """Return True if the turn has no seal and no empty text.

    A seal is known only from the done item, so `decompose_events` puts it after the item's other deltas. Log
    probabilities of an empty text cannot be matched with those of the first run.
    """
    return not any(isinstance(delta, d.ReasoningSeal) or delta == d.Text("", LOGPROBS) for delta in turn)


@given(turns.filter(_is_plain), st.data())
def test_interrupted_stream_continues_to_same_response(turn: list[d.Delta], data: Any) -> None:
    sent = compose_replay(turn[: data.draw(st.integers(0, len(turn) - 1))])
    composer = new_replay_composer()
    stream = [*composer.start(), *composer.compose(decompose_events(sent))]
    assert stream == sent
    stream += composer.compose(ReplayFilter(decompose_events(sent)).feed(turn))
    assert _summarize(fold(stream)) == _summarize(fold(compose_replay(turn)))


def _summarize(response: Response) -> list[Any]:
    return [
        (item.type, item.id, getattr(item, "arguments", None), extract_text(getattr(item, "content", None) or []))
        for item in response.output
    ]


@pytest.mark.parametrize(
    ("replayed", "second", "new"),
    [
        ([], [d.Text("a")], [d.Text("a")]),
        ([d.Text("a")], [d.Text("a")], []),
        ([d.ReasoningSummary("", 0)], [d.ReasoningSummary("", 0), d.Text("a")], [d.Text("a")]),
        ([d.ReasoningSummary("", 0)], [d.ReasoningSummary("ab", 0)], [d.ReasoningSummary("ab", 0)]),
        ([d.Text("a"), d.Text("b")], [d.Text("ab"), d.Text("c")], [d.Text("c")]),
        ([d.Text("ab")], [d.Text("a"), d.Text("b"), d.Text("c")], [d.Text("c")]),
        ([d.Text("a")], [d.Text("abc")], [d.Text("bc")]),
        ([d.Text("a")], [d.Text("a"), d.Finish()], [d.Finish()]),
        ([d.Reasoning("hm"), d.Text("a")], [d.Reasoning("hm"), d.Text("ab")], [d.Text("b")]),
        ([d.ReasoningSeal(""), d.Reasoning("hm")], [d.Reasoning("hm"), d.ReasoningSeal("s")], [d.ReasoningSeal("s")]),
        ([d.WholeItem(Compaction("blob", "cmp_1"))], [d.WholeItem(Compaction("blob")), d.Text("a")], [d.Text("a")]),
        (
            [d.ToolCall(2, "", "f", "call_1"), d.ToolCall(2, "{")],
            [d.ToolCall(0, "{"), d.ToolCall(0, "}", "f")],
            [d.ToolCall(2, "}", "f")],
        ),
        ([d.Text("a")], [d.Text("a"), d.ToolCall(0, "{"), d.Finish()], [d.ToolCall(0, "{"), d.Finish()]),
        (
            [d.ToolCall(0, "", "f")],
            [d.ToolCall(1, "", "f"), d.ToolCall(0, "", "f")],
            [d.ToolCall("new 1", "", "f")],
        ),
        (
            [d.ToolCall(2, "", "f", "call_1"), d.ToolCall(2, "{")],
            [d.ToolCall("x", "", "f"), d.ToolCall("x", "{}")],
            [d.ToolCall(2, "}")],
        ),
        ([d.Text("a"), d.CloseItem(), d.Text("b")], [d.Text("a"), d.CloseItem(), d.Text("bc")], [d.Text("c")]),
        (
            [d.Text("a"), d.CloseItem(), d.ToolCall(0, "", "f")],
            [d.Text("a"), d.ToolCall(1, "{", "f")],
            [d.ToolCall(0, "{", "f")],
        ),
        ([d.Phase("commentary"), d.Text("a")], [d.Phase("commentary"), d.Text("ab")], [d.Text("b")]),
        ([d.ToolCall(0, "{}", "f")], [d.ToolCall(7, "{}", "f"), d.CloseItem(7)], [d.CloseItem(0)]),
        ([d.OpenItem("sent 0", SEARCHING, "ws")], [d.OpenItem(3, SEARCHING), d.CloseItem(3)], [d.CloseItem("sent 0")]),
        # The next call has closed the first one, so its last fragment was ignored.
        (
            [d.ToolCall(0, "{}", "f"), d.CloseItem(0), d.ToolCall(1, "{", "g")],
            [d.ToolCall(0, "{}", "f"), d.ToolCall(1, "", "g"), d.ToolCall(0, "\n"), d.ToolCall(1, "{}")],
            [d.ToolCall(1, "}")],
        ),
    ],
)
def test_filter_returns_only_new_deltas(replayed: list[d.Delta], second: list[d.Delta], new: list[d.Delta]) -> None:
    assert ReplayFilter(replayed).feed(second) == new


@pytest.mark.parametrize(
    ("replayed", "second"),
    [
        ([d.Text("a")], [d.Text("b")]),
        ([d.Text("ab")], [d.Text("a"), d.Finish()]),
        ([d.Text("a")], [d.Finish()]),
        ([d.Text("a")], [d.Reasoning("a")]),
        ([d.ToolCall(0, "", "f")], [d.ToolCall(0, "", "g")]),
        ([d.ToolCall(0, "{", "f"), d.Text("a")], [d.ToolCall(0, "{}", "f")]),
        ([d.Text("a"), d.WholeItem(Unknown(b"{}"))], [d.Text("ab")]),
        ([d.Text("a"), d.CloseItem(), d.Text("b")], [d.Text("ab")]),
        ([d.Text("a"), d.NewPart(), d.Text("b")], [d.Text("ab")]),
        ([d.OpenItem(0, SEARCHING), d.Text("a")], [d.OpenItem(0, Unknown(b'{"type":"other"}'))]),
    ],
)
def test_different_second_run_diverges(replayed: list[d.Delta], second: list[d.Delta]) -> None:
    with pytest.raises(Diverged):
        ReplayFilter(replayed).feed(second)


def _shell_call(call_id: str) -> d.WholeItem:
    return d.WholeItem(ShellCall(call_id, ShellAction(["ls"]), status="completed"))


def _shell_output(call_id: str, text: str) -> d.WholeItem:
    return d.WholeItem(ShellCallOutput(call_id, [ShellOutput(text, "", {"type": "exit", "exit_code": 0})]))


@pytest.mark.parametrize("second_id", ["c", "x"])
def test_output_gets_call_id_of_first_run(second_id: str) -> None:
    sent = compose_replay([_shell_call("c"), _shell_output("c", "1"), _shell_call("c")])
    turn = [
        _shell_call(second_id),
        _shell_output(second_id, "1"),
        _shell_call(second_id),
        _shell_output(second_id, "2"),
        _shell_call(second_id),
        d.Finish(),
    ]
    composer = new_replay_composer()
    composer.start()
    composer.compose(decompose_events(sent))
    composer.compose(ReplayFilter(decompose_events(sent)).feed(turn))
    first, output, second, other, third = [item.call_id for item in composer.response.output]
    assert (first, output, other) == ("c", "c", second)
    assert len({first, second, third}) == 3


def test_second_run_may_use_different_call_id() -> None:
    sent = compose_replay([d.WholeItem(ShellCall("call_1", ShellAction(["ls"])))])
    second = [d.WholeItem(ShellCall("call_2", ShellAction(["ls"]))), d.Finish()]
    assert ReplayFilter(decompose_events(sent)).feed(second) == [d.Finish()]
