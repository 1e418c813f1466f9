"""Repair of stored histories."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.prepare.call_pairs import check_call_pairs
from antiphon.engine.prepare.history_repair import RepairedHistory, drop_unfinished_items, repair_history
from antiphon.engine.respond.ids import Mint
from antiphon.protocol import codec
from antiphon.protocol.content import InputImage, InputText, OutputText
from antiphon.protocol.hosted import LocalShellCallOutput, ShellAction, ShellCall, ToolSearchCall, ToolSearchOutput
from antiphon.protocol.items import (
    LOST_OUTPUT,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from antiphon.protocol.unions import Unknown

USER = Message("user", [InputText("hi")], "msg_u")
ANSWER = Message("assistant", [], "msg_a")
CALL = FunctionCall("call_1", "f", "{}", "fc_1")
OUTPUT = FunctionCallOutput("done", "call_1", "fco_1")
CUSTOM = CustomToolCall("call_2", "patch", "x", "ctc_1")
SHELL = ShellCall("call_3", ShellAction(["ls"]), "sh_1")
REASONING = Reasoning(id="rs_1")


def test_valid_history_stays_unchanged() -> None:
    sound = [USER, REASONING, CALL, OUTPUT, ANSWER, Unknown(b'{"type":"acme:x"}')]
    repaired = repair_history(sound)
    assert (repaired.items, repaired.repairs) == (sound, [])


def test_calls_at_the_end_get_no_output() -> None:
    assert repair_history([USER, CALL, CUSTOM]).repairs == []
    assert repair_history([USER, CALL, CUSTOM, OUTPUT]).repairs == []


@pytest.mark.parametrize("next_calls", [(), ("call_b",)])
def test_call_before_a_text_of_the_last_response_gets_no_output(next_calls: tuple[str, ...]) -> None:
    mint = Mint()
    first = FunctionCall("call_a", "f", "{}", mint.new_id("fc"))
    text = Message("assistant", [OutputText("I look it up.")], mint.new_id("msg"))
    history = [USER, first, FunctionCall("call_b", "f", "{}", mint.new_id("fc")), text]
    repaired = repair_history(history, answered_next=next_calls, last_response=mint.response_id)
    assert repaired == RepairedHistory(history, [])


def test_answering_one_response_repairs_the_calls_of_another() -> None:
    """Two use a conversation at once, and both have a call open."""
    ours, theirs = Mint(), Mint()
    mine = FunctionCall("call_m", "f", "{}", ours.new_id("fc"))
    other = FunctionCall("call_o", "f", "{}", theirs.new_id("fc"))
    repaired = repair_history([USER, mine, ANSWER, other], answered_next={"call_m"})
    assert repaired.items == [USER, mine, ANSWER, other, FunctionCallOutput(LOST_OUTPUT, "call_o", status="completed")]
    assert repaired.repairs == ["the call call_o had no output and got a note instead"]
    both = [USER, mine, FunctionCall("call_n", "f", "{}", ours.new_id("fc"))]
    assert repair_history(both, answered_next={"call_m"}).items == both


def test_call_in_the_middle_without_an_output_gets_a_note() -> None:
    repaired = repair_history([USER, CALL, CUSTOM, SHELL, USER, ANSWER])
    assert repaired.items == [
        USER,
        CALL,
        FunctionCallOutput(LOST_OUTPUT, "call_1", status="completed"),
        CUSTOM,
        CustomToolCallOutput("call_2", LOST_OUTPUT, status="completed"),
        ANSWER,
    ]
    assert repaired.repairs == [
        "a second message msg_u was left out",
        "the call call_1 had no output and got a note instead",
        "the call call_2 had no output and got a note instead",
        "the call call_3 had no output and was left out",
    ]


def test_server_searches_with_outputs_stay() -> None:
    searches, outputs = [ToolSearchCall({}, f"tsc_{n}") for n in "12"], [ToolSearchOutput([], f"tso_{n}") for n in "12"]
    sound = [USER, *searches, *outputs, ANSWER]
    assert repair_history(sound) == RepairedHistory(sound, [])
    assert drop_unfinished_items(sound) == (sound, [])


def test_server_search_without_its_other_half_is_dropped() -> None:
    pair = [ToolSearchCall({}, "tsc_2"), ToolSearchOutput([], "tso_2")]
    cut_off = [ToolSearchCall({}, "tsc_3", status="incomplete"), ToolSearchOutput([], "tso_3")]
    before, after = (
        [ToolSearchOutput([], "tso_0"), ToolSearchCall({}, "tsc_1")],
        [*cut_off, ToolSearchCall({}, "tsc_4")],
    )
    history = [*before, USER, *pair, ANSWER, *after, Message("user", "next")]
    repaired = repair_history(history)
    assert repaired.items == [USER, *pair, ANSWER, Message("user", "next")]
    assert repaired.repairs == [
        "the output tso_0 without its tool search was left out",
        "the tool search tsc_1 had no output and was left out",
        "the tool search tsc_3 had no output and was left out",
        "the output tso_3 without its tool search was left out",
        "the tool search tsc_4 had no output and was left out",
    ]
    assert drop_unfinished_items(history) == (repaired.items, repaired.repairs)


def test_reasoning_before_a_lone_search_is_dropped() -> None:
    history = [USER, REASONING, ToolSearchCall({}, "tsc_1"), Message("user", "next")]
    assert repair_history(history).items == [USER, Message("user", "next")]


def test_output_without_its_call_is_dropped() -> None:
    repaired = repair_history([USER, OUTPUT, ANSWER])
    assert (repaired.items, repaired.repairs) == ([USER, ANSWER], ["an output without its call call_1 was left out"])


def test_repeated_items_are_dropped() -> None:
    repaired = repair_history([USER, CALL, CALL, OUTPUT, FunctionCallOutput("again", "call_1", "fco_2"), ANSWER])
    assert repaired.items == [USER, CALL, OUTPUT, ANSWER]
    assert len(repaired.repairs) == 2


def test_different_items_with_one_id_all_stay() -> None:
    picture, another = ([InputImage(image_url=f"https://a.example/{n}")] for n in "12")
    contents: list[Item | Unknown] = [
        Message("user", [InputText("one")], "x"),
        Message("assistant", [OutputText("one")], "x"),
        Message("user", [InputText("two")], "x"),
        Message("user", picture, "x"),
        Message("user", another, "x"),
        Unknown(b'{"type":"acme:x","id":"x"}'),
        FunctionCall("call_1", "f", "{}", "x"),
        FunctionCallOutput("first", "call_1", "x"),
        FunctionCall("call_1", "f", "{}", "x"),
        FunctionCallOutput("second", "call_1", "x"),
    ]
    assert repair_history(contents) == RepairedHistory(contents, [])
    again = repair_history([*contents, *contents[:6], Message("user", "one", "x")])
    assert (again.items, len(again.repairs)) == (contents, 7)


def test_second_call_with_a_pending_call_id_is_another_call() -> None:
    later = FunctionCall("call_1", "g", "[]", "fc_2")
    noted = [USER, CALL, FunctionCallOutput(LOST_OUTPUT, "call_1", status="completed")]
    contents = ["the call call_1 had no output and got a note instead"]
    assert repair_history([USER, CALL, ANSWER, later]) == RepairedHistory([*noted, ANSWER, later], contents)
    assert repair_history([USER, CALL, later], answered_next={"call_1"}) == RepairedHistory([*noted, later], contents)
    assert repair_history([USER, CALL, later, OUTPUT]) == RepairedHistory([*noted, later, OUTPUT], contents)
    shell = ShellCall("call_1", ShellAction(["ls"]), "sh_1")
    gone = ["the call call_1 had no output and was left out"]
    assert repair_history([USER, shell, later, OUTPUT]) == RepairedHistory([USER, later, OUTPUT], gone)


def test_cut_off_call_with_an_answered_call_id_is_dropped() -> None:
    cut = FunctionCall("call_1", "g", '{"x', "fc_9", "incomplete")
    contents = ["the call call_1 was cut off and left out"]
    assert repair_history([USER, CALL, OUTPUT, cut]) == RepairedHistory([USER, CALL, OUTPUT], contents)
    assert repair_history([USER, CALL, cut]) == RepairedHistory([USER, CALL], contents)


CUT = FunctionCall("call_9", "g", '{"x', "fc_9", "incomplete")
CUT_OUTPUT = FunctionCallOutput("done", "call_9")


def test_cut_off_call_is_dropped_unless_answered() -> None:
    repaired = repair_history([USER, CUT])
    assert (repaired.items, repaired.repairs) == ([USER], ["the call call_9 was cut off and left out"])
    assert repair_history([USER, CUT, CUT_OUTPUT]) == RepairedHistory([USER, CUT, CUT_OUTPUT], [])
    assert repair_history([USER, CUT], answered_next={"call_9"}) == RepairedHistory([USER, CUT], [])


def test_next_output_answers_the_complete_call() -> None:
    cut = FunctionCall("call_1", "g", '{"x', "fc_9", "incomplete")
    contents = ["the call call_1 was cut off and left out"]
    assert repair_history([USER, CALL, cut], answered_next={"call_1"}) == RepairedHistory([USER, CALL], contents)
    assert repair_history([USER, cut, CALL], answered_next={"call_1"}) == RepairedHistory([USER, CALL], contents)


def test_cut_off_call_from_a_client_is_dropped_with_its_reasoning() -> None:
    sent = [USER, REASONING, CUT]
    check_call_pairs(sent)
    assert drop_unfinished_items(sent) == (
        [USER],
        ["the call call_9 was cut off and left out", "the reasoning rs_1 led to nothing and was left out"],
    )
    answered = [USER, REASONING, CUT, CUT_OUTPUT]
    check_call_pairs(answered)
    assert drop_unfinished_items(answered) == (answered, [])


def test_answered_call_id_can_be_reused() -> None:
    history = [
        USER,
        CALL,
        OUTPUT,
        FunctionCall("call_1", "g", "[]", "fc_2"),
        FunctionCallOutput("x", "call_1", "fco_2"),
    ]
    repaired = repair_history(history)
    assert (repaired.items, repaired.repairs) == (history, [])


def test_call_answered_by_the_next_input_gets_no_note() -> None:
    assert repair_history([USER, CALL, ANSWER], answered_next={"call_1"}).repairs == []


def test_dangling_reasoning_is_dropped() -> None:
    repaired = repair_history([REASONING, USER, Reasoning(id="rs_2"), Reasoning(id="rs_3")])
    assert repaired.items == [USER]
    assert repaired.repairs == [
        f"the reasoning {each} led to nothing and was left out" for each in ("rs_3", "rs_2", "rs_1")
    ]


call_ids = st.sampled_from(["a", "b", "c"])
item_ids = st.sampled_from([None, "x", "y"])
statuses = st.sampled_from([None, "completed", "incomplete"])
histories: st.SearchStrategy[list[Item | Unknown]] = st.lists(
    st.one_of(
        st.builds(FunctionCall, call_ids, st.just("f"), st.sampled_from(["{}", "[]"]), item_ids, statuses),
        st.builds(FunctionCallOutput, st.just("x"), call_ids, item_ids),
        st.builds(CustomToolCall, call_ids, st.just("f"), st.just("x"), item_ids),
        st.builds(CustomToolCallOutput, call_ids, st.just("x"), item_ids),
        st.builds(ShellCall, call_ids, st.just(ShellAction(["ls"])), item_ids),
        st.builds(LocalShellCallOutput, call_ids, st.just("x")),
        st.builds(ToolSearchCall, st.just({}), item_ids, st.none() | call_ids, status=statuses),
        st.builds(ToolSearchOutput, st.just([]), item_ids, st.none() | call_ids),
        st.builds(Message, st.just("user"), st.sampled_from(["hi", "ho"]), item_ids),
        st.builds(Reasoning, id=item_ids),
    ),
    max_size=12,
)


@given(histories)
def test_any_repaired_history_accepts_a_new_message(history: list[Item | Unknown]) -> None:
    """Any stored history, followed by outputs of its last calls, is accepted."""
    repaired = repair_history([*history, Message("user", "next")]).items
    check_call_pairs(repaired)


@given(histories)
def test_repairing_twice_changes_nothing_more(history: list[Item | Unknown]) -> None:
    once = repair_history(history).items
    assert repair_history(once) == RepairedHistory(once, [])


@pytest.mark.parametrize("answered", [True, False])
async def test_cut_off_call_reads_the_same_in_chain_and_replay(make_harness: Any, answered: bool) -> None:
    half = [{"tool_call": {"name": "f", "arguments": '{"x', "call_id": "call_9"}}, {"finish": "length"}]
    harness = await make_harness({"rules": [{"user": "call", "answers": [half]}], "default": "{history}"})
    tools = [{"type": "function", "name": "f"}]
    first = await harness.answer("call", tools=tools)
    (call,) = json.loads(codec.encode(first.output))
    assert (call["status"], call["arguments"]) == ("incomplete", '{"x')
    output = {"type": "function_call_output", "call_id": "call_9", "output": "broken"}
    rest = [*([output] if answered else []), {"role": "user", "content": "go on"}]
    chained = await harness.ask(rest, previous_response_id=first.id)
    replayed = await harness.ask([{"role": "user", "content": "call"}, call, *rest], store=False)
    contents = [] if answered else ["history: the call call_9 was cut off and left out"]
    assert chained.warnings == replayed.warnings == contents
    read = [(await run.drain()).output_text for run in (chained, replayed)]
    assert read == (["4", "4"] if answered else ["2", "2"])
