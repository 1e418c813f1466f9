"""Drafts: the parts and events of single output items."""

from typing import Any

import msgspec
import pytest

from antiphon.protocol import content, events, items
from antiphon.protocol.hosted import ShellAction, ShellCall
from antiphon.protocol.hosted_events import ShellCommandAdded, ShellCommandDelta, ShellCommandDone
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.decompose import decompose_events
from antiphon.stream.fold import fold
from support.composing import compose, compose_replay, compose_response, compose_types, new_composer


def test_new_part_stays_in_same_item() -> None:
    turn = (d.Reasoning("r"), d.NewPart(), d.Reasoning("s"), d.Text("a"), d.NewPart(), d.Text("b"), d.Finish())
    assert compose_response(*turn).output == [
        items.Reasoning([], "rs_1", [content.ReasoningText("r"), content.ReasoningText("s")], None, "completed"),
        items.Message(
            "assistant", [content.OutputText("a", [], []), content.OutputText("b", [], [])], "msg_2", "completed"
        ),
    ]
    assert fold(compose(*turn)) == compose_response(*turn)


def test_refusal_is_separate_part() -> None:
    (message,) = compose_response(d.Text("I "), d.Refusal("won't"), d.Finish()).output
    assert message == items.Message(
        "assistant", [content.OutputText("I ", [], []), content.Refusal("won't")], "msg_1", "completed"
    )


def test_annotations_and_logprobs_are_in_text_part() -> None:
    citation = content.UrlCitation("https://a.example", "A", 0, 2)
    logprob = content.LogProb("hi", -0.5)
    (message,) = compose_response(d.Text("hi", (logprob,)), d.Annotate(citation), d.Finish()).output
    assert message == items.Message(
        "assistant", [content.OutputText("hi", [citation], [logprob])], "msg_1", "completed"
    )


class CountingBatch(list[d.Delta]):
    """A batch that counts the deltas that are copied from it."""

    copied = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.copied += len(found) if isinstance(index, slice) else 0
        return found


@pytest.mark.parametrize("other", [d.Annotate(content.UrlCitation("https://a.example", "A", 0, 2)), d.NewPart()])
def test_batch_that_alternates_with_text_is_copied_in_linear_time(other: d.Delta) -> None:
    batch = CountingBatch([d.Text("a"), other] * 3000)
    composer = new_composer()
    assert len(composer.compose(batch)) >= len(batch)
    assert batch.copied <= 300 * len(batch)  # all deltas that follow would be 3000 for each, on average


def test_long_run_of_text_is_composed_completely() -> None:
    (message,) = compose_response(*(d.Text("a") for _ in range(2000)), d.Finish()).output
    assert message == items.Message("assistant", [content.OutputText("a" * 2000, [], [])], "msg_1", "completed")


def test_reasoning_events_with_summaries_precede_answer() -> None:
    batch = (
        d.Reasoning("hm"),
        d.ReasoningSummary("first", 0),
        d.ReasoningSummary("second", 1),
        d.ReasoningSeal("sealed"),
        d.Text("answer"),
        d.Finish(),
    )
    assert compose_types(*batch)[2:-7] == [
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
    assert compose_response(*batch).output[0] == items.Reasoning(
        [content.SummaryText("first"), content.SummaryText("second")],
        "rs_1",
        [content.ReasoningText("hm")],
        "sealed",
        "completed",
    )


def test_text_part_without_logprobs_has_an_empty_list() -> None:
    parts = [event.part for event in compose(d.Text("a"), d.Finish()) if isinstance(event, events.ContentPartEvent)]
    assert [msgspec.to_builtins(part) for part in parts] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
    ]


def test_arguments_done_event_has_the_name_of_the_function() -> None:
    stream = compose(d.ToolCall(0, "{", "f", "call_1"), d.ToolCall(0, "}"), d.Finish())
    (done,) = [event for event in stream if isinstance(event, events.FunctionCallArgumentsDone)]
    assert msgspec.to_builtins(done) == {
        "type": "response.function_call_arguments.done",
        "sequence_number": 5,
        "item_id": "fc_1",
        "output_index": 0,
        "arguments": "{}",
        "name": "f",
    }


def test_custom_call_has_free_text_input() -> None:
    stream = compose(d.CustomToolCall(0, "*** Begin", "apply_patch", "c"), d.CustomToolCall(0, " Patch"), d.Finish())
    assert [event.type.removeprefix("response.") for event in stream[3:-1]] == [
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert fold(stream).output == [items.CustomToolCall("c", "apply_patch", "*** Begin Patch", "ctc_1", "completed")]


def test_amended_fields_are_in_done_item() -> None:
    known, new = {"created_by": msgspec.Raw(b'"me"')}, {"mood": msgspec.Raw(b"1.50")}
    turn = (d.ToolCall(0, "{}", "f", "call_1"), d.Amend(known, 0), d.Text("a"), d.Amend(new), d.Finish())
    assert compose_response(*turn).output == [
        items.FunctionCall("call_1", "f", "{}", "fc_1", "completed", created_by="me"),
        Unknown(
            b'{"type":"message","role":"assistant","content":[{"type":"output_text","text":"a","annotations":[],'
            b'"logprobs":[]}],"id":"msg_2","status":"completed","mood":1.50}'
        ),
    ]


def test_whole_shell_call_emits_events_for_each_command() -> None:
    call = ShellCall("call_1", ShellAction(["ls", ""]), "sh_1")
    assert compose(d.WholeItem(call))[2:] == [
        events.OutputItemAdded(2, 0, call),
        ShellCommandAdded(3, 0, 0, ""),
        ShellCommandDelta(4, 0, 0, "ls"),
        ShellCommandDone(5, 0, 0, "ls"),
        ShellCommandAdded(6, 0, 1, ""),
        ShellCommandDelta(7, 0, 1, ""),
        ShellCommandDone(8, 0, 1, ""),
        events.OutputItemDone(9, 0, call),
    ]


@pytest.mark.parametrize(
    ("ending", "status"), [(d.Finish(), None), (d.Finish("length"), "incomplete")], ids=["completed", "incomplete"]
)
def test_reasoning_without_status_gets_none_unless_it_is_incomplete(ending: d.Finish, status: str | None) -> None:
    composed: list[Any] = compose(d.NoStatus(), d.Reasoning("a"), ending)
    item_events = [event for event in composed if isinstance(event, events.OutputItemAdded | events.OutputItemDone)]
    assert [event.item.status for event in item_events] == [None, status]
    next_items: list[Any] = compose_response(
        d.NoStatus(), d.Reasoning("a"), d.Text("b"), d.Reasoning("c"), d.Finish()
    ).output
    assert [item.status for item in next_items] == [None, "completed", "completed"]


def test_reasoning_without_status_is_composed_again_from_its_events() -> None:
    composed = compose_replay([d.NoStatus(), d.Reasoning("a"), d.CloseItem(), d.Reasoning("b"), d.Finish()])
    again = compose_replay([*decompose_events(composed[:-1]), d.Finish()])
    assert again == composed
