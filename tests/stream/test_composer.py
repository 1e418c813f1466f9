"""The composer: examples, and properties of the events of any deltas."""

from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.protocol import codec, content, events, items
from antiphon.protocol.events import Event
from antiphon.protocol.hosted import LocalShellAction, LocalShellCall, ToolSearchCall, ToolSearchOutput
from antiphon.protocol.response import IncompleteDetails, Response, ResponseError, Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.composer import Composer
from antiphon.stream.drafts import MessageDraft
from antiphon.stream.fold import fold
from support.composing import TEXT_END, TEXT_START, compose, compose_response, compose_types, new_composer
from support.turns import turns

LOGPROB = content.LogProb("b", -1.0, [98], [])


def test_queued_response_emits_queued_event() -> None:
    queued = Response(id="resp_1", created_at=1, model="m", status="queued")
    stream = Composer(queued, new_id=str, now=int).start()
    assert [(event.type, event.response.status) for event in stream if isinstance(event, events.Lifecycle)] == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]


def test_composer_reports_done_items_and_open_calls() -> None:
    composer = new_composer()
    composer.compose([d.Text("a")])
    assert (composer.has_calls, composer.output) == (False, [])
    composer.compose([d.ToolCall("1", "{")])
    assert composer.has_calls is True
    composer.compose([d.ToolCall("1", "}", "f")])
    assert (composer.has_calls, [item.type for item in composer.output]) == (True, ["message"])


def test_taken_sequence_number_is_not_reused() -> None:
    composer = new_composer()
    composer.start()
    taken = composer.take_sequence_number()
    assert [event.sequence_number for event in composer.compose([d.Text("a")]) if isinstance(event, events.Event)] == [
        taken + 1,
        taken + 2,
        taken + 3,
    ]


# Text items


def test_text_deltas_become_one_message_with_one_part() -> None:
    assert compose_types(d.Text("Hel"), d.Text("lo"), d.Finish()) == [
        "created",
        "in_progress",
        *TEXT_START,
        "output_text.delta",
        *TEXT_END,
        "completed",
    ]
    assert compose_response(d.Text("Hel"), d.Text("lo"), d.Finish()) == Response(
        id="resp_1",
        created_at=1,
        completed_at=9,
        model="m",
        status="completed",
        output=[items.Message("assistant", [content.OutputText("Hello", [], [])], "msg_1", "completed")],
    )


def test_text_after_close_item_starts_new_message() -> None:
    assert compose_response(
        d.Text("a"), d.CloseItem(), d.Text("b"), d.CloseItem(ending="incomplete"), d.Finish()
    ).output == [
        items.Message("assistant", [content.OutputText("a", [], [])], "msg_1", "completed"),
        items.Message("assistant", [content.OutputText("b", [], [])], "msg_2", "incomplete"),
    ]


def test_close_item_without_open_item_emits_nothing() -> None:
    assert compose(d.CloseItem(), d.CloseItem(7), d.Amend({}, 7), d.NewPart()) == compose()


def test_phase_applies_to_next_message() -> None:
    turn = (d.Phase("commentary"), d.Reasoning("hm"), d.Text("a"), d.CloseItem(), d.Text("b"), d.Finish())
    assert compose_response(*turn).output[1:] == [
        items.Message("assistant", [content.OutputText("a", [], [])], "msg_2", "completed", "commentary"),
        items.Message("assistant", [content.OutputText("b", [], [])], "msg_3", "completed"),
    ]
    announced = [event.item for event in compose(*turn) if isinstance(event, events.OutputItemAdded)]
    assert announced[1] == items.Message("assistant", [], "msg_2", "in_progress", "commentary")


# Tool calls and whole items


def test_tool_call_closes_open_message() -> None:
    assert compose_types(d.Text("a"), d.ToolCall(0, "{}", "f", "call_9"), d.Finish()) == [
        "created",
        "in_progress",
        *TEXT_START,
        *TEXT_END,
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_text_after_call_starts_second_message() -> None:
    response = compose_response(d.Text("a"), d.ToolCall(0, "{}", "f", "c"), d.Text("b"), d.ToolCall(0, " "), d.Finish())
    assert [(item.type, item.id) for item in response.output] == [
        ("message", "msg_1"),
        ("function_call", "fc_2"),
        ("message", "msg_3"),
    ]
    assert response.output[1] == items.FunctionCall("c", "f", "{} ", "fc_2", "completed")


def test_closed_call_is_done_immediately() -> None:
    assert compose_types(d.ToolCall(0, "{}", "f"), d.CloseItem(0), d.ToolCall(1, "{}", "g"))[4:] == [
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
    ]


def test_whole_call_is_done_before_next_call() -> None:
    types = compose_types(
        d.ToolCall(0, '{"x":', "f"), d.ToolCall(0, "1}"), d.ToolCall(1, "{}", "g"), d.ToolCall(0, "\n"), d.Finish()
    )
    assert types[2:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_calls_that_may_continue_stay_open() -> None:
    response = compose_response(
        d.ToolCall("a", "1", "f", "call_a"),
        d.CustomToolCall("b", "{}", "g", "call_b"),
        d.ToolCall("c", "{}", "h", "call_c"),
        d.ToolCall("d", "{}", "k", "call_d"),
        d.ToolCall("a", "2"),
        d.CustomToolCall("b", "!"),
        d.ToolCall("c", " "),
        d.Finish(),
    )
    assert response.output == [
        items.FunctionCall("call_a", "f", "12", "fc_1", "completed"),
        items.CustomToolCall("call_b", "g", "{}!", "ctc_2", "completed"),
        items.FunctionCall("call_c", "h", "{} ", "fc_3", "completed"),
        items.FunctionCall("call_d", "k", "{}", "fc_4", "completed"),
    ]


def test_interleaved_calls_are_separate_items() -> None:
    response = compose_response(
        d.ToolCall("a", '{"x":', "f", "call_a"),
        d.ToolCall("b", "[", "g", "call_b"),
        d.ToolCall("a", "1}"),
        d.ToolCall("b", "]"),
        d.Finish(),
    )
    assert response.output == [
        items.FunctionCall("call_a", "f", '{"x":1}', "fc_1", "completed"),
        items.FunctionCall("call_b", "g", "[]", "fc_2", "completed"),
    ]


def test_arguments_before_name_are_held_until_name() -> None:
    stream = compose(d.ToolCall(0, '{"x"'), d.ToolCall(0, ":1}", "f", "call_1"), d.Finish())
    assert stream[2] == events.OutputItemAdded(2, 0, items.FunctionCall("call_1", "f", "", "fc_1", "in_progress"))
    assert fold(stream).output == [items.FunctionCall("call_1", "f", '{"x":1}', "fc_1", "completed")]


def test_call_without_name_fails_response() -> None:
    response = compose_response(d.ToolCall(0, "{}"), d.Finish())
    assert (response.status, response.error) == (
        "failed",
        codec.decode_response(codec.encode(response)).error,
    )
    assert response.error is not None
    assert response.error.code == "model_error"


CLOSED_CALLS: list[list[d.Delta]] = [
    [d.ToolCall(0, '{"a":1}', "f", "c"), d.ToolCall(1, "", "g", "e")],
    [d.ToolCall(0, '{"a":1}', "f", "c", has_end=True), d.CloseItem(0)],
    [d.CustomToolCall(0, "a", "f", "c"), d.CloseItem(0)],
]


@pytest.mark.parametrize("calls", CLOSED_CALLS)
@pytest.mark.parametrize("blank", ["", " ", "\r\n\t"])
def test_blank_fragments_of_a_closed_call_are_ignored(calls: list[d.Delta], blank: str) -> None:
    late = type(calls[0])(0, blank)
    for reason in ("stop", "length", "cancelled"):
        finish = d.Finish(reason)
        assert compose(*calls, late, d.Text("a"), late, finish) == compose(*calls, d.Text("a"), finish)


@pytest.mark.parametrize("calls", CLOSED_CALLS)
@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
def test_continued_closed_call_fails_response(calls: list[d.Delta], reason: Any) -> None:
    late = type(calls[0])(0, "{}")
    failed = d.Failure("The model continued a closed call.", "model_error", "model_error")
    assert compose(*calls, late, d.Text("a"), d.Finish(reason)) == compose(*calls, d.Text("a"), failed)


def test_continued_closed_call_can_be_cancelled() -> None:
    call, late = d.ToolCall(0, "{}", "f", "c"), d.ToolCall(0, "{}")
    cancelled = d.Finish("cancelled")
    assert compose(call, d.CloseItem(0), late, cancelled) == compose(call, d.CloseItem(0), cancelled)


def test_key_of_an_ended_call_may_be_used_again() -> None:
    first = d.ToolCall(0, "{}", "f", "c")
    response = compose_response(
        first, d.CloseItem(0), d.ToolCall(0, "", "h", "k"), d.ToolCall(0, "[]"), d.CloseItem(0), first, d.Finish()
    )
    assert (response.status, response.output) == (
        "completed",
        [
            items.FunctionCall("c", "f", "{}", "fc_1", "completed"),
            items.FunctionCall("k", "h", "[]", "fc_2", "completed"),
            items.FunctionCall("c_3", "f", "{}", "fc_3", "completed"),
        ],
    )


def test_repeated_name_of_a_closed_call_begins_no_other_call() -> None:
    calls, finish = (d.ToolCall(0, "{}", "f", "c"), d.ToolCall(1, "{}", "g", "e")), d.Finish()
    assert compose(*calls, d.ToolCall(0, " ", "f"), finish) == compose(*calls, finish)
    failed = d.Failure("The model continued a closed call.", "model_error", "model_error")
    assert compose(*calls, d.ToolCall(0, "{}", "f"), finish) == compose(*calls, failed)


def test_call_without_id_gets_generated_id() -> None:
    (call,) = compose_response(d.ToolCall(0, "{}", "f"), d.Finish()).output
    assert call == items.FunctionCall("call_1", "f", "{}", "fc_1", "completed")


def test_call_ids_are_unique_in_response() -> None:
    shell = LocalShellCall("c", LocalShellAction(["ls"], {}), "", "completed")
    opened, closed = (Unknown(b'{"type":"acme_call","id":"up","call_id":"c","status":"%b"}' % s) for s in (b"a", b"b"))
    response = compose_response(
        d.ToolCall(0, "{}", "f", "c"),
        d.ToolCall(1, "{}", "f", "c_3"),
        d.ToolCall(2, "{}", "g", "c"),
        d.CustomToolCall(3, "x", "h", "c"),
        d.WholeItem(shell),
        d.WholeItem(opened),
        d.OpenItem(4, opened),
        d.CloseItem(4, closed),
        d.WholeItem(ToolSearchCall({}, call_id="c")),
        d.WholeItem(ToolSearchOutput([], call_id="c")),
        d.WholeItem(Unknown(b'{"type":"acme:note","call_id":"c"}')),
        d.Finish(),
    )
    output = [msgspec.json.decode(codec.encode(item)) for item in response.output]
    assert [(item["type"], item["call_id"], item.get("status")) for item in output] == [
        ("function_call", "c", "completed"),
        ("function_call", "c_3", "completed"),
        ("function_call", "c_4", "completed"),
        ("custom_tool_call", "c_5", "completed"),
        ("local_shell_call", "c_6", "completed"),
        ("acme_call", "c_7", "a"),
        ("acme_call", "c_8", "b"),
        ("tool_search_call", "c_9", None),
        ("tool_search_output", "c_9", None),
        ("acme:note", "c", None),
    ]


def test_whole_item_is_added_and_done() -> None:
    unknown = Unknown(b'{"type":"acme:thing","id":"x_1" , "n":1.0}')
    stream = compose(d.WholeItem(unknown), d.Finish())
    assert stream[2:4] == [events.OutputItemAdded(2, 0, unknown), events.OutputItemDone(3, 0, unknown)]
    assert fold(stream).output == [unknown]


def test_whole_item_gets_missing_ids() -> None:
    (item,) = compose_response(
        d.WholeItem(LocalShellCall("", LocalShellAction(["ls"], {}), "", "completed")), d.Finish()
    ).output
    assert isinstance(item, LocalShellCall)
    assert (item.id, item.call_id) == ("lsh_1", "call_1")


# The end of the turn


def test_usage_is_in_terminal_event_only() -> None:
    stream = compose(d.TokenUsage(Usage(1, 2, 3)), d.Text("a"), d.Finish())
    lifecycles = [event.response.usage for event in stream if isinstance(event, events.Lifecycle)]
    assert lifecycles == [None, None, Usage(1, 2, 3)]


def test_output_of_an_open_model_call_begins_after_its_usage_delta() -> None:
    response = Response(id="resp_1", created_at=0, model="m")
    composer = Composer(response, new_id=lambda prefix: prefix, now=int)
    found = []
    for delta in (
        d.WholeItem(items.Compaction("c")),
        d.TokenUsage(Usage(1, 2, 3)),
        d.TokenUsage(Usage(1, 2, 3), is_open=True),
        d.WholeItem(items.Compaction("c")),
        d.TokenUsage(Usage(2, 4, 6)),
    ):
        found.append((composer.open_from, composer.usage))
        composer.compose([delta])
    found.append((composer.open_from, composer.usage))
    spent = Usage(1, 2, 3)
    assert found == [(0, None), (0, None), (None, spent), (1, spent), (1, spent), (None, Usage(2, 4, 6))]


def test_finish_length_leaves_last_item_incomplete() -> None:
    response = compose_response(
        d.Text("a"), d.ToolCall(0, "{}", "f", "c"), d.ToolCall(1, '{"x', "g", "e"), d.Finish("length")
    )
    assert [getattr(item, "status", None) for item in response.output] == ["completed", "completed", "incomplete"]
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.completed_at is None


def test_unfinished_call_before_last_item_is_incomplete() -> None:
    response = compose_response(d.ToolCall(0, '{"x', "f", "c"), d.ToolCall(1, '{"y', "g", "e"), d.Finish("length"))
    assert [getattr(item, "status", None) for item in response.output] == ["incomplete", "incomplete"]


def test_finish_content_filter_makes_response_incomplete() -> None:
    response = compose_response(d.Text("a"), d.Finish("content_filter"))
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "content_filter"


def test_finish_detail_replaces_incomplete_reason() -> None:
    assert compose_response(d.Finish("length", "steered")).incomplete_details == IncompleteDetails("steered")


def test_cancelled_response_has_partial_output() -> None:
    composer = new_composer()
    stream = [*composer.start(), *composer.compose([d.Text("so far"), d.Finish("cancelled")])]
    assert stream[-1].type == "response.incomplete"
    assert fold(stream) == composer.response
    assert composer.response.status == "cancelled"
    assert composer.response.output == [
        items.Message("assistant", [content.OutputText("so far", [], [])], "msg_1", "incomplete")
    ]


def test_steered_response_has_partial_output() -> None:
    response = compose_response(d.Text("so far"), d.Finish("steered"))
    assert (response.status, response.incomplete_details) == ("incomplete", IncompleteDetails("steered"))
    assert response.output == [
        items.Message("assistant", [content.OutputText("so far", [], [])], "msg_1", "incomplete")
    ]


def test_failure_emits_error_then_failed() -> None:
    stream = compose(d.Text("a"), d.Failure("it broke", "overloaded", "server_error"))
    assert [event.type for event in stream[-3:]] == ["response.output_item.done", "error", "response.failed"]
    assert stream[-2] == events.Error(8, events.ErrorPayload("server_error", "overloaded", "it broke", None))
    assert fold(stream).status == "failed"


def test_failed_response_has_all_error_fields() -> None:
    response = compose_response(d.Failure("too long", "context_length_exceeded", "invalid_request_error", "input"))
    assert response.error == ResponseError(
        "context_length_exceeded", "too long", param="input", type="invalid_request_error"
    )


# Properties of any stream


@given(turns)
def test_any_stream_folds_to_response_of_terminal_event(turn: list[d.Delta]) -> None:
    composer = new_composer()
    stream = [*composer.start(), *composer.compose(turn)]
    last = stream[-1]
    assert isinstance(last, events.TERMINAL)
    assert fold(stream) == last.response == composer.response


@given(turns)
def test_sequence_numbers_increase_by_one_and_response_id_is_constant(turn: list[d.Delta]) -> None:
    stream = [msgspec.json.decode(codec.encode(event)) for event in compose(*turn)]
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert {event["response"]["id"] for event in stream if "response" in event} == {"resp_1"}


@given(turns)
def test_only_last_event_is_terminal(turn: list[d.Delta]) -> None:
    stream = compose(*turn)
    assert [index for index, event in enumerate(stream) if isinstance(event, events.TERMINAL)] == [len(stream) - 1]


@given(turns)
def test_every_added_item_is_done_once_with_same_id_and_index(turn: list[d.Delta]) -> None:
    stream = compose(*turn)
    added = [(e.output_index, e.item.id) for e in stream if isinstance(e, events.OutputItemAdded)]
    done = [(e.output_index, e.item.id) for e in stream if isinstance(e, events.OutputItemDone)]
    assert sorted(added) == sorted(done)
    assert [index for index, _ in added] == list(range(len(added)))


@given(turns)
def test_events_round_trip_through_codec(turn: list[d.Delta]) -> None:
    stream = compose(*turn)
    encoded = [codec.encode(event) for event in stream]
    decoded = [codec.encode(codec.decode_event(raw)) for raw in encoded]
    assert list(map(msgspec.json.decode, decoded)) == list(map(msgspec.json.decode, encoded))


@given(turns, st.data())
def test_batch_boundaries_do_not_change_events(turn: list[d.Delta], data: Any) -> None:
    composer = new_composer()
    stream: list[Event | Unknown] = list(composer.start())
    rest = turn
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        stream += composer.compose(rest[:size])
        rest = rest[size:]
    assert stream == compose(*turn)


@given(
    st.lists(st.sampled_from([d.Text("a"), d.Text("\u00fc\n"), d.Text(""), d.Text("b", (LOGPROB,))]), max_size=6), turns
)
def test_run_of_text_composes_like_single_deltas(texts: list[d.Delta], turn: list[d.Delta]) -> None:
    deltas = [d.Text("first"), *texts, *turn]
    composer = new_composer()
    single: list[Event | Unknown] = [*composer.start()]
    with patch.object(MessageDraft, "continue_text", lambda *_: []):
        for delta in deltas:
            single += composer.compose([delta])
    composer = new_composer()
    assert [*composer.start(), *composer.compose([deltas[0]]), *composer.compose(deltas[1:])] == single


@given(turns)
def test_incomplete_item_is_last_or_unfinished_call(turn: list[d.Delta]) -> None:
    last = compose(*turn)[-1]
    assert isinstance(last, events.Lifecycle)
    for item in last.response.output[:-1]:
        assert getattr(item, "status", None) != "incomplete" or isinstance(item, items.FunctionCall)
