"""Parallel calls that an upstream interleaves or ends together are sent one after the other."""

import msgspec
import pytest

from antiphon.protocol import events, items
from antiphon.protocol.events import Event
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from support.composing import compose, compose_response, new_composer

FIRST, REST = d.ToolCall("a", '{"x":', "f", "call_a"), d.ToolCall("a", "1}")
AMEND = d.Amend({"extra": msgspec.Raw(b"1")}, "b")
NOTE = d.ItemPassthrough(Unknown(b'{"type":"response.acme.note","item_id":"up","output_index":7}'), "b")


@pytest.mark.parametrize(
    ("interleaved", "sequential"),
    [
        (
            [FIRST, d.ToolCall("b", "[", "g", "call_b"), REST, d.ToolCall("b", "]")],
            [FIRST, REST, d.ToolCall("b", "[", "g", "call_b"), d.ToolCall("b", "]")],
        ),
        (
            [FIRST, d.CustomToolCall("b", "x", "g"), d.CustomToolCall("b", "y"), REST],
            [FIRST, REST, d.CustomToolCall("b", "x", "g"), d.CustomToolCall("b", "y")],
        ),
        (
            [FIRST, d.ToolCall("b", "{"), d.ToolCall("b", "", "g", "call_b"), REST, d.ToolCall("b", "}")],
            [FIRST, REST, d.ToolCall("b", "{"), d.ToolCall("b", "", "g", "call_b"), d.ToolCall("b", "}")],
        ),
        (
            [FIRST, d.ToolCall("b", "{", "g"), REST, d.ToolCall("c", "{}", "h"), d.ToolCall("b", "}"), d.Text("a")],
            [FIRST, REST, d.ToolCall("b", "{", "g"), d.ToolCall("b", "}"), d.ToolCall("c", "{}", "h"), d.Text("a")],
        ),
        (
            [FIRST, d.ToolCall("b", "{}", "g"), AMEND, NOTE, d.CloseItem("b"), d.CloseItem("a"), d.Text("a")],
            [FIRST, d.CloseItem("a"), d.ToolCall("b", "{}", "g"), AMEND, NOTE, d.CloseItem("b"), d.Text("a")],
        ),
        (
            [FIRST, d.ToolCall("b", "{}", "g"), d.CloseItem("b"), d.ToolCall("b", "{}", "h"), d.CloseItem("a")],
            [FIRST, d.CloseItem("a"), d.ToolCall("b", "{}", "g"), d.CloseItem("b"), d.ToolCall("b", "{}", "h")],
        ),
        (
            [FIRST, d.ToolCall("b", "{}", "g"), d.CloseItem("b"), d.ToolCall("b", "{}"), d.CloseItem("a")],
            [FIRST, d.CloseItem("a"), d.ToolCall("b", "{}", "g"), d.CloseItem("b"), d.ToolCall("b", "{}")],
        ),
    ],
)
def test_interleaved_calls_are_sent_one_after_the_other(interleaved: list[d.Delta], sequential: list[d.Delta]) -> None:
    one_by_one = new_composer()
    stream: list[Event | Unknown] = [*one_by_one.start()]
    for delta in [*interleaved, d.Finish()]:
        stream += one_by_one.compose([delta])
    assert stream == compose(*interleaved, d.Finish()) == compose(*sequential, d.Finish())


def test_item_after_a_call_that_waits_comes_after_it() -> None:
    call = d.ToolCall("b", "{", "g", "call_b")
    for item in (d.Text("a"), d.WholeItem(items.Compaction("c")), d.OpenItem("k", Unknown(b'{"type":"acme"}'))):
        announced = [
            (event.output_index, event.item.type)
            for event in compose(FIRST, call, item, REST, d.ToolCall("b", "}"), d.Finish())
            if isinstance(event, events.OutputItemAdded)
        ]
        assert announced[:2] == [(0, "function_call"), (1, "function_call")]
        assert len(announced) == 3
    response = compose_response(FIRST, call, d.Text("a"), REST, d.ToolCall("b", "}"), d.Finish())
    assert response.output[:2] == [
        items.FunctionCall("call_a", "f", '{"x":1}', "fc_1", "completed"),
        items.FunctionCall("call_b", "g", "{}", "fc_2", "completed"),
    ]


@pytest.mark.parametrize("end", [d.Finish("length"), d.Failure("m", "c", "t")])
def test_calls_that_wait_at_a_cut_off_end_are_incomplete(end: d.Delta) -> None:
    calls = (FIRST, d.ToolCall("b", "{}", "g", "call_b"), d.ToolCall("c", "{}", "h", "call_c"))
    assert compose_response(*calls, end).output == [
        items.FunctionCall("call_a", "f", '{"x":', "fc_1", "incomplete"),
        items.FunctionCall("call_b", "g", "{}", "fc_2", "completed"),
        items.FunctionCall("call_c", "h", "{}", "fc_3", "incomplete"),
    ]
