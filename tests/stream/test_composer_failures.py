"""Illegal deltas, and the end of a response after one."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.protocol import codec, content, items
from antiphon.protocol.events import Event
from antiphon.protocol.response import ResponseError
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.composer import IllegalDelta
from antiphon.stream.fold import fold
from support.composing import TEXT_END, compose_response, new_composer
from support.turns import turns

DEEP = 100_000
NESTED = Unknown(b'{"type":"acme","x":' + b"[" * DEEP + b"]" * DEEP + b"}")
BROKEN: list[Any] = [
    d.Passthrough(NESTED),
    d.OpenItem("deep", NESTED),
    d.WholeItem(NESTED),
    d.Annotate(items.Compaction("no annotation")),  # type: ignore[arg-type]
    d.Finish("no reason"),  # type: ignore[arg-type]
    object(),
]


def test_delta_after_finish_is_illegal() -> None:
    composer = new_composer()
    with pytest.raises(IllegalDelta) as caught:
        composer.compose([d.Text("a"), d.Finish(), d.Text("b")])
    assert [event.type for event in caught.value.events][-1] == "response.completed"


def test_unsaved_terminal_event_is_replaced_with_failure() -> None:
    composer = new_composer()
    stream = [*composer.start(), *composer.compose([d.Text("a"), d.Finish()])]
    replaced = composer.replace_terminal(stream, d.Failure("not stored"))
    assert [event.type for event in replaced[-2:]] == ["error", "response.failed"]
    assert fold(replaced) == composer.response
    assert composer.response.status == "failed"
    assert composer.response.completed_at is None


def test_call_with_too_deep_arguments_is_incomplete() -> None:
    nested = '{"a":' * DEEP + "1" + "}" * DEEP
    response = compose_response(d.ToolCall(0, nested, "f", "c"), d.ToolCall(1, '{"y', "g", "e"), d.Finish("length"))
    assert response.output == [
        items.FunctionCall("c", "f", nested, "fc_1", "incomplete"),
        items.FunctionCall("e", "g", '{"y', "fc_2", "incomplete"),
    ]


@given(turns, st.sampled_from(BROKEN))
def test_response_fails_after_any_illegal_delta(turn: list[d.Delta], broken: Any) -> None:
    composer = new_composer()
    stream = [*composer.start(), *composer.compose(turn[:-2])]
    try:
        stream += composer.compose([*turn[-2:-1], broken])
    except IllegalDelta as error:
        stream += composer.fail(error.events, d.Failure("sorry"))
        assert [event.type for event in stream[-2:]] == ["error", "response.failed"]
        assert fold(stream) == composer.response
        assert [_get_number(event) for event in stream] == list(range(len(stream)))


def test_events_of_failed_finish_are_emitted_again() -> None:
    composer = new_composer()
    stream = [*composer.start(), *composer.compose([d.Text("a"), d.CloseItem(), d.ToolCall(0, "{", "f", "c")])]
    stream += composer.compose([d.ToolCall(0, 5, "", "c"), d.Text("b")])  # type: ignore[arg-type]
    taken = composer.take_sequence_number()
    with pytest.raises(IllegalDelta) as caught:
        composer.compose([d.Finish()])
    rest = composer.fail(caught.value.events, d.Failure("sorry", "x"))
    assert [(event.type.removeprefix("response."), _get_number(event)) for event in rest] == [
        ("output_item.done", taken + 1),
        *((name, taken + 2 + index) for index, name in enumerate(TEXT_END)),
        ("error", taken + 5),
        ("failed", taken + 6),
    ]
    assert composer.response.output == [
        items.Message("assistant", [content.OutputText("a", [], [])], "msg_1", "completed"),
        items.FunctionCall("c", "f", "", "fc_2", "incomplete"),
        items.Message("assistant", [content.OutputText("b", [], [])], "msg_3", "incomplete"),
    ]
    assert (composer.response.status, composer.response.error) == (
        "failed",
        ResponseError("x", "sorry", type="server_error"),
    )


def test_lost_item_ends_are_emitted_again() -> None:
    composer = new_composer()
    stream = [*composer.start(), *composer.compose([d.Text("a"), d.OpenItem("k", Unknown(b'{"type":"acme"}'))])]
    stream += composer.compose([d.ToolCall(0, "{}", "f", "c"), d.ToolCall(1, 5, "g", "e")])  # type: ignore[arg-type]
    with pytest.raises(IllegalDelta) as caught:
        composer.compose([d.Finish()])
    stream += composer.fail(caught.value.events, d.Failure("sorry"))
    assert fold(stream) == composer.response
    assert [item.type for item in composer.response.output] == ["message", "acme", "function_call", "function_call"]


def _get_number(event: Event | Unknown) -> int:
    return int(msgspec.json.decode(codec.encode(event))["sequence_number"])
