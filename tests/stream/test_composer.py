"""The composer: fixed examples of its order, and laws over any sequence of deltas."""

from typing import Any

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
from antiphon.stream.composer import Composer, IllegalDelta
from antiphon.stream.fold import fold
from support.composing import TEXT, TEXT_END, compose, final, new_composer, told
from support.turns import turns


def test_text_is_told_as_one_message_with_one_part() -> None:
    assert told(d.Text("Hel"), d.Text("lo"), d.Finish()) == [
        "created",
        "in_progress",
        *TEXT,
        "output_text.delta",
        *TEXT_END,
        "completed",
    ]
    assert final(d.Text("Hel"), d.Text("lo"), d.Finish()) == Response(
        id="resp_1",
        created_at=1,
        completed_at=9,
        model="m",
        status="completed",
        output=[items.Message("assistant", [content.OutputText("Hello")], "msg_1", "completed")],
    )


def test_a_call_closes_the_message_before_it() -> None:
    assert told(d.Text("a"), d.ToolCall(0, "{}", "f", "call_9"), d.Finish()) == [
        "created",
        "in_progress",
        *TEXT,
        *TEXT_END,
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_what_is_closed_is_followed_by_an_item_of_its_own() -> None:
    assert final(d.Text("a"), d.CloseItem(), d.Text("b"), d.CloseItem(ending="incomplete"), d.Finish()).output == [
        items.Message("assistant", [content.OutputText("a")], "msg_1", "completed"),
        items.Message("assistant", [content.OutputText("b")], "msg_2", "incomplete"),
    ]


def test_a_call_that_is_closed_is_told_so_at_once() -> None:
    assert told(d.ToolCall(0, "{}", "f"), d.CloseItem(0), d.ToolCall(1, "{}", "g"))[4:] == [
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
    ]


def test_closing_what_is_not_there_tells_nothing() -> None:
    assert compose(d.CloseItem(), d.CloseItem(7), d.Amend({}, 7), d.NewPart()) == compose()


def test_a_phase_is_that_of_the_next_message() -> None:
    turn = (d.Phase("commentary"), d.Reasoning("hm"), d.Text("a"), d.CloseItem(), d.Text("b"), d.Finish())
    assert final(*turn).output[1:] == [
        items.Message("assistant", [content.OutputText("a")], "msg_2", "completed", "commentary"),
        items.Message("assistant", [content.OutputText("b")], "msg_3", "completed"),
    ]
    announced = [event.item for event in compose(*turn) if isinstance(event, events.OutputItemAdded)]
    assert announced[1] == items.Message("assistant", [], "msg_2", "in_progress", "commentary")


def test_a_new_part_stays_in_its_item() -> None:
    turn = (d.Reasoning("r"), d.NewPart(), d.Reasoning("s"), d.Text("a"), d.NewPart(), d.Text("b"), d.Finish())
    assert final(*turn).output == [
        items.Reasoning([], "rs_1", [content.ReasoningText("r"), content.ReasoningText("s")], None, "completed"),
        items.Message("assistant", [content.OutputText("a"), content.OutputText("b")], "msg_2", "completed"),
    ]
    assert fold(compose(*turn)) == final(*turn)


def test_amendments_are_in_the_item_when_it_is_done() -> None:
    known, new = {"created_by": msgspec.Raw(b'"me"')}, {"mood": msgspec.Raw(b"1.50")}
    turn = (d.ToolCall(0, "{}", "f", "call_1"), d.Amend(known, 0), d.Text("a"), d.Amend(new), d.Finish())
    assert final(*turn).output == [
        items.FunctionCall("call_1", "f", "{}", "fc_1", "completed", created_by="me"),
        Unknown(
            b'{"type":"message","role":"assistant","content":[{"type":"output_text","text":"a","annotations":[]}],'
            b'"id":"msg_2","status":"completed","mood":1.50}'
        ),
    ]


SEARCH = items.WebSearchCall("ws_up", {"type": "search"}, "completed")
SEARCHING = Unknown(b'{"type":"response.web_search_call.searching","item_id":"ws_up","output_index":9,"x":1.50}')


def test_a_carried_item_keeps_its_events_under_an_id_of_ours() -> None:
    begun = Unknown(b'{"type":"web_search_call","id":"ws_up","status":"in_progress"}')
    turn = (d.Text("a"), d.OpenItem(3, begun, "ws"), d.ItemEvent(SEARCHING, 3), d.CloseItem(3, SEARCH))
    assert compose(*turn)[-3:] == [
        events.OutputItemAdded(8, 1, Unknown(b'{"type":"web_search_call","id":"ws_2","status":"in_progress"}')),
        Unknown(
            b'{"type":"response.web_search_call.searching","item_id":"ws_2","output_index":1,"x":1.50,'
            b'"sequence_number":9}'
        ),
        events.OutputItemDone(10, 1, items.WebSearchCall("ws_2", {"type": "search"}, "completed")),
    ]


def test_an_event_about_what_is_said_gets_its_id() -> None:
    event = Unknown(b'{"type":"acme.glow","item_id":"msg_up","item":{"id":"msg_up","n":1}}')
    assert compose(d.Text("a"), d.ItemEvent(event))[-1] == Unknown(
        b'{"type":"acme.glow","item_id":"msg_1","item":{"id":"msg_1","n":1},"sequence_number":5}'
    )


@pytest.mark.parametrize(
    ("item", "left"),
    [
        (items.WebSearchCall("ws_up", {}, "searching"), items.WebSearchCall("ws_1", {}, "incomplete")),
        (
            Unknown(b'{"type":"acme","status":"in_progress"}'),
            Unknown(b'{"type":"acme","status":"incomplete","id":"ws_1"}'),
        ),
        (Unknown(b'{"type":"acme"}'), Unknown(b'{"type":"acme","id":"ws_1"}')),
    ],
)
def test_a_carried_item_that_is_never_closed_is_incomplete_in_the_end(item: Any, left: Any) -> None:
    assert final(d.OpenItem(0, item, "ws"), d.Finish("length")).output == [left]


def test_a_key_is_opened_once() -> None:
    with pytest.raises(IllegalDelta, match="already in use"):
        compose(d.OpenItem(0, SEARCH), d.CloseItem(0), d.OpenItem(0, SEARCH))


def test_an_incomplete_answer_may_have_a_reason_of_its_own() -> None:
    assert final(d.Finish("length", "steered")).incomplete_details == IncompleteDetails("steered")


def test_interleaved_calls_stay_apart() -> None:
    response = final(
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


def test_arguments_that_come_before_the_name_wait_for_it() -> None:
    stream = compose(d.ToolCall(0, '{"x"'), d.ToolCall(0, ":1}", "f", "call_1"), d.Finish())
    assert stream[2] == events.OutputItemAdded(2, 0, items.FunctionCall("call_1", "f", "", "fc_1", "in_progress"))
    assert fold(stream).output == [items.FunctionCall("call_1", "f", '{"x":1}', "fc_1", "completed")]


def test_a_call_that_never_gets_a_name_fails_the_response() -> None:
    response = final(d.ToolCall(0, "{}"), d.Finish())
    assert (response.status, response.error) == (
        "failed",
        codec.decode_response(codec.encode(response)).error,
    )
    assert response.error is not None
    assert response.error.code == "model_error"


def test_a_call_without_an_id_gets_one() -> None:
    (call,) = final(d.ToolCall(0, "{}", "f"), d.Finish()).output
    assert call == items.FunctionCall("call_1", "f", "{}", "fc_1", "completed")


def test_no_two_calls_of_a_response_have_the_same_id() -> None:
    shell = LocalShellCall("", "c", LocalShellAction(["ls"], {}), "completed")
    opened, closed = (Unknown(b'{"type":"acme_call","id":"up","call_id":"c","status":"%b"}' % s) for s in (b"a", b"b"))
    response = final(
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
    told = [msgspec.json.decode(codec.encode(item)) for item in response.output]
    assert [(item["type"], item["call_id"], item.get("status")) for item in told] == [
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


def test_text_after_a_call_is_a_second_message() -> None:
    response = final(d.Text("a"), d.ToolCall(0, "{}", "f", "c"), d.Text("b"), d.ToolCall(0, " "), d.Finish())
    assert [(item.type, item.id) for item in response.output] == [
        ("message", "msg_1"),
        ("function_call", "fc_2"),
        ("message", "msg_3"),
    ]
    assert response.output[1] == items.FunctionCall("c", "f", "{} ", "fc_2", "completed")


def test_custom_calls_carry_free_text() -> None:
    stream = compose(d.CustomToolCall(0, "*** Begin", "apply_patch", "c"), d.CustomToolCall(0, " Patch"), d.Finish())
    assert [event.type.removeprefix("response.") for event in stream[3:-1]] == [
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert fold(stream).output == [items.CustomToolCall("c", "apply_patch", "*** Begin Patch", "ctc_1", "completed")]


def test_reasoning_is_told_before_the_answer_with_its_summaries() -> None:
    batch = (
        d.Reasoning("hm"),
        d.ReasoningSummary("first", 0),
        d.ReasoningSummary("second", 1),
        d.ReasoningSeal("sealed"),
        d.Text("answer"),
        d.Finish(),
    )
    assert told(*batch)[2:-7] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert final(*batch).output[0] == items.Reasoning(
        [content.SummaryText("first"), content.SummaryText("second")],
        "rs_1",
        [content.ReasoningText("hm")],
        "sealed",
        "completed",
    )


def test_a_refusal_is_a_part_of_its_own() -> None:
    (message,) = final(d.Text("I "), d.Refusal("won't"), d.Finish()).output
    assert message == items.Message(
        "assistant", [content.OutputText("I "), content.Refusal("won't")], "msg_1", "completed"
    )


def test_annotations_and_logprobs_end_up_on_their_part() -> None:
    citation = content.UrlCitation("https://a.example", "A", 0, 2)
    logprob = content.LogProb("hi", -0.5)
    (message,) = final(d.Text("hi", (logprob,)), d.Annotate(citation), d.Finish()).output
    assert message == items.Message(
        "assistant", [content.OutputText("hi", [citation], [logprob])], "msg_1", "completed"
    )


def test_running_out_of_tokens_leaves_the_last_item_incomplete() -> None:
    response = final(d.Text("a"), d.ToolCall(0, "{}", "f", "c"), d.ToolCall(1, '{"x', "g", "e"), d.Finish("length"))
    assert [getattr(item, "status", None) for item in response.output] == ["completed", "completed", "incomplete"]
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.completed_at is None


def test_a_filtered_answer_is_incomplete() -> None:
    response = final(d.Text("a"), d.Finish("content_filter"))
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "content_filter"


def test_a_failure_is_an_error_then_a_failed_response() -> None:
    stream = compose(d.Text("a"), d.Failure("it broke", "overloaded", "server_error"))
    assert [event.type for event in stream[-3:]] == ["response.output_item.done", "error", "response.failed"]
    assert stream[-2] == events.Error(8, events.ErrorPayload("server_error", "overloaded", "it broke", None))
    assert fold(stream).status == "failed"


def test_a_failed_response_says_all_that_the_error_does() -> None:
    response = final(d.Failure("too long", "context_length_exceeded", "invalid_request_error", "input"))
    assert response.error == ResponseError(
        "context_length_exceeded", "too long", param="input", type="invalid_request_error"
    )


def test_a_whole_item_is_added_and_done_at_once() -> None:
    unknown = Unknown(b'{"type":"acme:thing","id":"x_1" , "n":1.0}')
    stream = compose(d.WholeItem(unknown), d.Finish())
    assert stream[2:4] == [events.OutputItemAdded(2, 0, unknown), events.OutputItemDone(3, 0, unknown)]
    assert fold(stream).output == [unknown]


def test_an_unknown_event_is_forwarded_with_its_place_in_the_numbering() -> None:
    stream = compose(d.Passthrough(Unknown(b'{"type":"acme.tick","sequence_number":77,"x":1.50}')), d.Finish())
    assert isinstance(stream[2], Unknown)
    assert stream[2].raw == b'{"type":"acme.tick","sequence_number":2,"x":1.50}'


def test_usage_is_told_with_the_terminal_event_only() -> None:
    stream = compose(d.TokenUsage(Usage(1, 2, 3)), d.Text("a"), d.Finish())
    lifecycles = [event.response.usage for event in stream if isinstance(event, events.Lifecycle)]
    assert lifecycles == [None, None, Usage(1, 2, 3)]


def test_nothing_may_follow_the_end() -> None:
    composer = new_composer()
    with pytest.raises(IllegalDelta) as caught:
        composer.compose([d.Text("a"), d.Finish(), d.Text("b")])
    assert [event.type for event in caught.value.events][-1] == "response.completed"


def test_an_end_that_could_not_be_kept_is_retracted_for_a_failure() -> None:
    composer = new_composer()
    stream = [*composer.start(), *composer.compose([d.Text("a"), d.Finish()])]
    retracted = composer.replace_terminal(stream, d.Failure("not stored"))
    assert [event.type for event in retracted[-2:]] == ["error", "response.failed"]
    assert fold(retracted) == composer.response
    assert composer.response.status == "failed"
    assert composer.response.completed_at is None


def test_a_cancelled_response_ends_with_what_it_has() -> None:
    composer = new_composer()
    stream = [*composer.start(), *composer.compose([d.Text("so far"), d.Finish("cancelled")])]
    assert stream[-1].type == "response.incomplete"
    assert fold(stream) == composer.response
    assert composer.response.status == "cancelled"
    assert composer.response.output == [
        items.Message("assistant", [content.OutputText("so far")], "msg_1", "incomplete")
    ]


def test_a_steered_response_says_so_and_ends_with_what_it_has() -> None:
    response = final(d.Text("so far"), d.Finish("steered"))
    assert (response.status, response.incomplete_details) == ("incomplete", IncompleteDetails("steered"))
    assert response.output == [items.Message("assistant", [content.OutputText("so far")], "msg_1", "incomplete")]


def test_a_number_that_is_taken_is_not_given_again() -> None:
    composer = new_composer()
    composer.start()
    taken = composer.take_sequence_number()
    assert [event.sequence_number for event in composer.compose([d.Text("a")]) if isinstance(event, events.Event)] == [
        taken + 1,
        taken + 2,
        taken + 3,
    ]


def test_it_is_known_what_is_whole_and_whether_calls_have_begun() -> None:
    composer = new_composer()
    composer.compose([d.Text("a")])
    assert (composer.has_calls, composer.output) == (False, [])
    composer.compose([d.ToolCall("1", "{")])
    assert composer.has_calls is True
    composer.compose([d.ToolCall("1", "}", "f")])
    assert (composer.has_calls, [item.type for item in composer.output]) == (True, ["message"])


def test_a_response_that_waited_in_a_queue_says_so() -> None:
    queued = Response(id="resp_1", created_at=1, model="m", status="queued")
    stream = Composer(queued, new_id=str, now=int).start()
    assert [(event.type, event.response.status) for event in stream if isinstance(event, events.Lifecycle)] == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]


@given(turns)
def test_every_stream_folds_to_the_response_of_its_terminal_event(turn: list[d.Delta]) -> None:
    composer = new_composer()
    stream = [*composer.start(), *composer.compose(turn)]
    last = stream[-1]
    assert isinstance(last, events.TERMINAL)
    assert fold(stream) == last.response == composer.response


@given(turns)
def test_numbers_rise_by_one_from_zero_and_the_id_never_changes(turn: list[d.Delta]) -> None:
    stream = [msgspec.json.decode(codec.encode(event)) for event in compose(*turn)]
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert {event["response"]["id"] for event in stream if "response" in event} == {"resp_1"}


@given(turns)
def test_there_is_one_terminal_event_and_it_is_last(turn: list[d.Delta]) -> None:
    stream = compose(*turn)
    assert [index for index, event in enumerate(stream) if isinstance(event, events.TERMINAL)] == [len(stream) - 1]


@given(turns)
def test_every_item_added_is_done_once_under_the_same_id_and_index(turn: list[d.Delta]) -> None:
    stream = compose(*turn)
    added = [(e.output_index, e.item.id) for e in stream if isinstance(e, events.OutputItemAdded)]
    done = [(e.output_index, e.item.id) for e in stream if isinstance(e, events.OutputItemDone)]
    assert sorted(added) == sorted(done)
    assert [index for index, _ in added] == list(range(len(added)))


@given(turns)
def test_events_survive_encoding(turn: list[d.Delta]) -> None:
    stream = compose(*turn)
    encoded = [codec.encode(event) for event in stream]
    decoded = [codec.encode(codec.decode_event(raw)) for raw in encoded]
    assert list(map(msgspec.json.decode, decoded)) == list(map(msgspec.json.decode, encoded))


@given(turns, st.data())
def test_the_cut_into_batches_changes_nothing(turn: list[d.Delta], data: Any) -> None:
    composer = new_composer()
    stream: list[Event | Unknown] = list(composer.start())
    rest = turn
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        stream += composer.compose(rest[:size])
        rest = rest[size:]
    assert stream == compose(*turn)


@given(turns)
def test_an_incomplete_item_is_the_last_one_or_half_a_call(turn: list[d.Delta]) -> None:
    last = compose(*turn)[-1]
    assert isinstance(last, events.Lifecycle)
    for item in last.response.output[:-1]:
        assert getattr(item, "status", None) != "incomplete" or isinstance(item, items.FunctionCall)


def test_half_a_call_beside_the_last_item_is_incomplete_too() -> None:
    response = final(d.ToolCall(0, '{"x', "f", "c"), d.ToolCall(1, '{"y', "g", "e"), d.Finish("length"))
    assert [getattr(item, "status", None) for item in response.output] == ["incomplete", "incomplete"]
