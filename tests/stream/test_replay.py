"""Going on with a stream that was cut."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.protocol.content import LogProb, extract_text
from antiphon.protocol.events import Event
from antiphon.protocol.hosted import ShellAction, ShellCall, ShellCallOutput, ShellOutput
from antiphon.protocol.items import Compaction
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.composer import Composer
from antiphon.stream.decompose import decompose_events
from antiphon.stream.fold import fold
from antiphon.stream.replay import Diverged, ReplayFilter
from support.turns import turns

SEARCHING = Unknown(b'{"type":"web_search_call","id":"ws_1"}')


def new_composer() -> Composer:
    serial = itertools.count(1)
    return Composer(
        Response(id="resp_token", created_at=1, model="m"),
        new_id=lambda prefix: f"{prefix}_token{next(serial)}",
        now=lambda: 9,
    )


def tell(turn: list[d.Delta]) -> list[Event | Unknown]:
    composer = new_composer()
    return [*composer.start(), *composer.compose(turn)]


def _plain(turn: list[d.Delta]) -> bool:
    """Nothing is sealed: a seal shows only when its item is done, and so is recalled behind all the rest of it.

    And no text is empty: probabilities of no words at all cannot be told from those that were told before.
    """
    return not any(isinstance(delta, d.ReasoningSeal) or delta == d.Text("", EMPTY) for delta in turn)


EMPTY = (LogProb("x", -1.0, [120]),)


@given(turns)
def test_composing_what_a_stream_recalls_tells_the_same_stream(turn: list[d.Delta]) -> None:
    unfinished = tell(turn[:-1])
    assert tell(decompose_events(unfinished)) == unfinished


@given(turns.filter(_plain), st.data())
def test_a_stream_cut_anywhere_goes_on_to_the_same_response(turn: list[d.Delta], data: Any) -> None:
    shown = tell(turn[: data.draw(st.integers(0, len(turn) - 1))])
    composer = new_composer()
    stream = [*composer.start(), *composer.compose(decompose_events(shown))]
    assert stream == shown
    stream += composer.compose(ReplayFilter(decompose_events(shown)).feed(turn))
    assert _outline(fold(stream)) == _outline(fold(tell(turn)))


def _outline(response: Response) -> list[Any]:
    return [
        (item.type, item.id, getattr(item, "arguments", None), extract_text(getattr(item, "content", None) or []))
        for item in response.output
    ]


@pytest.mark.parametrize(
    ("told", "second", "new"),
    [
        ([], [d.Text("a")], [d.Text("a")]),
        ([d.Text("a")], [d.Text("a")], []),
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
    ],
)
def test_only_what_is_new_comes_through(told: list[d.Delta], second: list[d.Delta], new: list[d.Delta]) -> None:
    assert ReplayFilter(told).feed(second) == new


@pytest.mark.parametrize(
    ("told", "second"),
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
def test_a_second_run_that_says_anything_else_diverges(told: list[d.Delta], second: list[d.Delta]) -> None:
    with pytest.raises(Diverged):
        ReplayFilter(told).feed(second)


def _shell(call_id: str) -> d.WholeItem:
    return d.WholeItem(ShellCall(call_id, ShellAction(["ls"]), status="completed"))


def _listing(call_id: str, text: str) -> d.WholeItem:
    return d.WholeItem(ShellCallOutput(call_id, [ShellOutput(text, "", {"type": "exit", "exit_code": 0})]))


@pytest.mark.parametrize("again", ["c", "x"])
def test_an_output_goes_to_the_call_that_was_told_whatever_a_second_run_calls_it(again: str) -> None:
    shown = tell([_shell("c"), _listing("c", "1"), _shell("c")])
    turn = [_shell(again), _listing(again, "1"), _shell(again), _listing(again, "2"), _shell(again), d.Finish()]
    composer = new_composer()
    composer.start()
    composer.compose(decompose_events(shown))
    composer.compose(ReplayFilter(decompose_events(shown)).feed(turn))
    first, output, second, other, third = [item.call_id for item in composer.response.output]
    assert (first, output, other) == ("c", "c", second)
    assert len({first, second, third}) == 3
