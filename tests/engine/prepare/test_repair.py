"""Mending stored history."""

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


def test_a_sound_history_is_left_alone() -> None:
    sound = [USER, REASONING, CALL, OUTPUT, ANSWER, Unknown(b'{"type":"acme:x"}')]
    mended = repair_history(sound)
    assert (mended.items, mended.repairs) == (sound, [])


def test_calls_at_the_end_wait_for_their_outputs() -> None:
    assert repair_history([USER, CALL, CUSTOM]).repairs == []
    assert repair_history([USER, CALL, CUSTOM, OUTPUT]).repairs == []


def test_who_answers_one_response_need_not_know_the_calls_of_another() -> None:
    """Two use a conversation at once, and both have a call open."""
    ours, theirs = Mint(), Mint()
    mine = FunctionCall("call_m", "f", "{}", ours("fc"))
    other = FunctionCall("call_o", "f", "{}", theirs("fc"))
    mended = repair_history([USER, mine, ANSWER, other], answered_next={"call_m"})
    assert mended.items == [USER, mine, ANSWER, other, FunctionCallOutput(LOST_OUTPUT, "call_o", status="completed")]
    assert mended.repairs == ["the call call_o had no output and got a note instead"]
    both = [USER, mine, FunctionCall("call_n", "f", "{}", ours("fc"))]
    assert repair_history(both, answered_next={"call_m"}).items == both


def test_a_call_in_the_middle_without_an_output_gets_a_note_instead() -> None:
    mended = repair_history([USER, CALL, CUSTOM, SHELL, USER, ANSWER])
    assert mended.items == [
        USER,
        CALL,
        FunctionCallOutput(LOST_OUTPUT, "call_1", status="completed"),
        CUSTOM,
        CustomToolCallOutput("call_2", LOST_OUTPUT, status="completed"),
        ANSWER,
    ]
    assert mended.repairs == [
        "a second message msg_u was left out",
        "the call call_1 had no output and got a note instead",
        "the call call_2 had no output and got a note instead",
        "the call call_3 had no output and was left out",
    ]


def test_a_search_of_the_server_has_no_call_to_answer() -> None:
    sound = [USER, ToolSearchCall({}, "tsc_1"), ToolSearchOutput([], "tso_1"), ANSWER]
    assert repair_history(sound) == RepairedHistory(sound, [])


def test_an_output_without_its_call_is_left_out() -> None:
    mended = repair_history([USER, OUTPUT, ANSWER])
    assert (mended.items, mended.repairs) == ([USER, ANSWER], ["an output without its call call_1 was left out"])


def test_repeated_items_are_left_out() -> None:
    mended = repair_history([USER, CALL, CALL, OUTPUT, FunctionCallOutput("again", "call_1", "fco_2"), ANSWER])
    assert mended.items == [USER, CALL, OUTPUT, ANSWER]
    assert len(mended.repairs) == 2


def test_items_that_share_an_id_and_say_different_things_are_all_kept() -> None:
    picture, another = ([InputImage(image_url=f"https://a.example/{n}")] for n in "12")
    told: list[Item | Unknown] = [
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
    assert repair_history(told) == RepairedHistory(told, [])
    again = repair_history([*told, *told[:6], Message("user", "one", "x")])
    assert (again.items, len(again.repairs)) == (told, 7)


def test_a_call_with_the_id_of_one_that_waits_is_another_one() -> None:
    later = FunctionCall("call_1", "g", "[]", "fc_2")
    noted = [USER, CALL, FunctionCallOutput(LOST_OUTPUT, "call_1", status="completed")]
    told = ["the call call_1 had no output and got a note instead"]
    assert repair_history([USER, CALL, ANSWER, later]) == RepairedHistory([*noted, ANSWER, later], told)
    assert repair_history([USER, CALL, later], answered_next={"call_1"}) == RepairedHistory([*noted, later], told)
    assert repair_history([USER, CALL, later, OUTPUT]) == RepairedHistory([*noted, later, OUTPUT], told)
    shell = ShellCall("call_1", ShellAction(["ls"]), "sh_1")
    gone = ["the call call_1 had no output and was left out"]
    assert repair_history([USER, shell, later, OUTPUT]) == RepairedHistory([USER, later, OUTPUT], gone)


def test_half_a_call_under_the_id_of_an_answered_one_is_left_out() -> None:
    cut = FunctionCall("call_1", "g", '{"x', "fc_9", "incomplete")
    told = ["the call call_1 was cut off and left out"]
    assert repair_history([USER, CALL, OUTPUT, cut]) == RepairedHistory([USER, CALL, OUTPUT], told)
    assert repair_history([USER, CALL, cut]) == RepairedHistory([USER, CALL], told)


CUT = FunctionCall("call_9", "g", '{"x', "fc_9", "incomplete")
CUT_OUTPUT = FunctionCallOutput("done", "call_9")


def test_half_a_call_is_left_out_unless_somebody_answered_it() -> None:
    mended = repair_history([USER, CUT])
    assert (mended.items, mended.repairs) == ([USER], ["the call call_9 was cut off and left out"])
    assert repair_history([USER, CUT, CUT_OUTPUT]) == RepairedHistory([USER, CUT, CUT_OUTPUT], [])
    assert repair_history([USER, CUT], answered_next={"call_9"}) == RepairedHistory([USER, CUT], [])


def test_what_is_answered_next_is_a_whole_call_rather_than_half_a_one() -> None:
    cut = FunctionCall("call_1", "g", '{"x', "fc_9", "incomplete")
    told = ["the call call_1 was cut off and left out"]
    assert repair_history([USER, CALL, cut], answered_next={"call_1"}) == RepairedHistory([USER, CALL], told)
    assert repair_history([USER, cut, CALL], answered_next={"call_1"}) == RepairedHistory([USER, CALL], told)


def test_half_a_call_that_a_client_sends_back_is_left_out_with_the_reasoning_that_led_to_it() -> None:
    sent = [USER, REASONING, CUT]
    check_call_pairs(sent)
    assert drop_unfinished_items(sent) == (
        [USER],
        ["the call call_9 was cut off and left out", "the reasoning rs_1 led to nothing and was left out"],
    )
    answered = [USER, REASONING, CUT, CUT_OUTPUT]
    check_call_pairs(answered)
    assert drop_unfinished_items(answered) == (answered, [])


def test_an_answered_calls_id_may_come_again_for_another_call() -> None:
    history = [
        USER,
        CALL,
        OUTPUT,
        FunctionCall("call_1", "g", "[]", "fc_2"),
        FunctionCallOutput("x", "call_1", "fco_2"),
    ]
    mended = repair_history(history)
    assert (mended.items, mended.repairs) == (history, [])


def test_a_call_that_the_next_input_answers_gets_no_note() -> None:
    assert repair_history([USER, CALL, ANSWER], answered_next={"call_1"}).repairs == []


def test_reasoning_that_led_to_nothing_is_left_out() -> None:
    mended = repair_history([REASONING, USER, Reasoning(id="rs_2"), Reasoning(id="rs_3")])
    assert mended.items == [USER]
    assert mended.repairs == [
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
        st.builds(Message, st.just("user"), st.sampled_from(["hi", "ho"]), item_ids),
        st.builds(Reasoning, id=item_ids),
    ),
    max_size=12,
)


@given(histories)
def test_no_history_can_brick_the_next_message(history: list[Item | Unknown]) -> None:
    """Whatever was stored, the same history followed by an answer to its open calls is accepted."""
    mended = repair_history([*history, Message("user", "next")]).items
    check_call_pairs(mended)


@given(histories)
def test_mending_twice_changes_nothing_more(history: list[Item | Unknown]) -> None:
    once = repair_history(history).items
    assert repair_history(once) == RepairedHistory(once, [])


@pytest.mark.parametrize("answered", [True, False])
async def test_half_a_call_of_ours_is_read_alike_in_a_chain_and_in_a_replay(make_bench: Any, answered: bool) -> None:
    half = [{"tool_call": {"name": "f", "arguments": '{"x', "call_id": "call_9"}}, {"finish": "length"}]
    bench = await make_bench({"rules": [{"user": "call", "answers": [half]}], "default": "{history}"})
    tools = [{"type": "function", "name": "f"}]
    first = await bench.answer("call", tools=tools)
    (call,) = json.loads(codec.encode(first.output))
    assert (call["status"], call["arguments"]) == ("incomplete", '{"x')
    output = {"type": "function_call_output", "call_id": "call_9", "output": "broken"}
    rest = [*([output] if answered else []), {"role": "user", "content": "go on"}]
    chained = await bench.ask(rest, previous_response_id=first.id)
    replayed = await bench.ask([{"role": "user", "content": "call"}, call, *rest], store=False)
    told = [] if answered else ["history: the call call_9 was cut off and left out"]
    assert chained.warnings == replayed.warnings == told
    read = [(await run.drain()).output_text for run in (chained, replayed)]
    assert read == (["4", "4"] if answered else ["2", "2"])
