"""Steps: what must stay together."""

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.serve.compaction.selection import find_end_of_outputs, join_unread_steps, pair_calls, split_steps
from antiphon.protocol import hosted
from antiphon.protocol.items import Item, Reasoning
from antiphon.protocol.unions import Unknown
from support.compaction import assistant, call, output, user

THOUGHT = Reasoning(id="rs_1", encrypted_content="x")


def test_messages_are_steps_and_a_call_is_one_with_its_output_and_the_thought_before_it() -> None:
    items: list[Item | Unknown] = [user("a"), THOUGHT, call("1"), output("1", "x"), assistant("b"), user("c")]
    assert split_steps(items) == [[items[0]], items[1:4], [items[4]], [items[5]]]


def test_calls_side_by_side_are_one_step() -> None:
    items: list[Item | Unknown] = [call("1"), call("2"), output("2", "x"), output("1", "x"), call("3"), output("3", "")]
    assert split_steps(items) == [items[:4], items[4:]]


def test_a_call_id_may_come_again() -> None:
    items: list[Item | Unknown] = [call("1"), output("1", "x"), user("a"), call("1"), output("1", "y")]
    assert split_steps(items) == [items[:2], [items[2]], items[3:]]


def test_pairs_of_every_kind_stay_together() -> None:
    action = hosted.LocalShellAction(["ls"], {})
    items: list[Item | Unknown] = [
        hosted.LocalShellCall("lsc_1", "call_1", action, "completed"),
        hosted.LocalShellCallOutput("call_1", "a.txt"),
        hosted.McpApprovalRequest("mcpr_1", "{}", "look", "acme"),
        hosted.McpApprovalResponse("mcpr_1", True),
        Unknown(b'{"type":"acme_call","call_id":"c"}'),
        Unknown(b'{"type":"acme_call_output","call_id":"c"}'),
        hosted.ToolSearchCall({}, call_id="t"),
        hosted.ToolSearchOutput([], call_id="t"),
    ]
    assert split_steps(items) == [items[:2], items[2:4], items[4:6], items[6:]]


def test_a_call_that_nobody_can_look_into_is_a_step() -> None:
    deep = Unknown(b'{"type":"acme_call","x":%b,"call_id":"c"}' % (b"[" * 100_000 + b"]" * 100_000))
    assert split_steps([user("a"), deep, user("b")]) == [[user("a")], [deep], [user("b")]]


def test_calls_without_an_output_hold_nothing_up() -> None:
    items: list[Item | Unknown] = [user("a"), call("1"), call("2")]
    assert split_steps(items) == [[items[0]], [items[1]], [items[2]]]


def test_outputs_and_the_messages_after_them_are_one_step_that_nobody_has_read() -> None:
    items: list[Item | Unknown] = [assistant("a"), call("1"), output("1", "x"), user("b"), user("c")]
    assert join_unread_steps(split_steps(items)) == [items[:1], items[1:]]


def test_what_the_model_has_said_is_not_among_what_it_has_not_read() -> None:
    items: list[Item | Unknown] = [call("1"), output("1", "x"), assistant("a"), user("b"), user("c")]
    assert join_unread_steps(split_steps(items)) == [items[:2], items[2:3], items[3:]]


def test_with_nothing_unread_the_steps_are_what_they_were() -> None:
    items: list[Item | Unknown] = [user("a"), call("1"), output("1", "x")]
    assert join_unread_steps(split_steps(items)) == split_steps(items)
    assert join_unread_steps([]) == []


def test_of_a_step_each_call_is_with_its_output() -> None:
    step: list[Item | Unknown] = [
        THOUGHT,
        call("1"),
        call("2"),
        output("2", "x"),
        user("a"),
        output("1", "y"),
        user("b"),
    ]
    assert pair_calls(step) == [[THOUGHT], [step[1], step[5]], [step[2], step[3]], [step[4]], [step[6]]]
    assert find_end_of_outputs(step) == 6


kinds = st.sampled_from(["user", "thought", "call 1", "call 2", "output 1", "output 2"])


@settings(max_examples=60)
@given(st.lists(kinds, max_size=20))
def test_nothing_is_lost_and_no_pair_is_parted(drawn: list[str]) -> None:
    items: list[Item | Unknown] = []
    waiting: set[str] = set()
    for kind in drawn:
        word, _, number = kind.partition(" ")
        if word == "call" and number not in waiting:
            waiting.add(number)
            items.append(call(number))
        elif word == "output" and number in waiting:
            waiting.discard(number)
            items.append(output(number, "x"))
        elif word in ("user", "thought"):
            items.append(user("hi") if word == "user" else THOUGHT)
    items += [output(number, "x") for number in sorted(waiting)]
    steps = split_steps(items)
    assert [item for step in steps for item in step] == items
    for step in steps:
        calls = [item.call_id for item in step if item.type == "function_call"]
        assert sorted(calls) == sorted(item.call_id for item in step if item.type == "function_call_output")
