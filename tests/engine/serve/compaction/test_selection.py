"""Steps of a conversation, and the selection of items to retain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.serve.compaction.clipping import measure_item
from antiphon.engine.serve.compaction.selection import (
    SelectedItems,
    SizeLimits,
    find_end_of_outputs,
    join_unread_steps,
    pair_calls,
    select_items,
    split_steps,
)
from antiphon.protocol import hosted
from antiphon.protocol.content import ComputerScreenshot, InputText, extract_text
from antiphon.protocol.hosted import ComputerCall, ComputerCallOutput
from antiphon.protocol.items import FunctionCallOutput, Item, Message, Reasoning
from antiphon.protocol.unions import Unknown
from support.compaction import assistant, call, output, user

# Steps


THOUGHT = Reasoning(id="rs_1", encrypted_content="x")


def test_call_is_in_one_step_with_its_output_and_reasoning() -> None:
    items: list[Item | Unknown] = [user("a"), THOUGHT, call("1"), output("1", "x"), assistant("b"), user("c")]
    assert split_steps(items) == [[items[0]], items[1:4], [items[4]], [items[5]]]


def test_parallel_calls_are_one_step() -> None:
    items: list[Item | Unknown] = [call("1"), call("2"), output("2", "x"), output("1", "x"), call("3"), output("3", "")]
    assert split_steps(items) == [items[:4], items[4:]]


def test_reused_call_id_starts_a_new_step() -> None:
    items: list[Item | Unknown] = [call("1"), output("1", "x"), user("a"), call("1"), output("1", "y")]
    assert split_steps(items) == [items[:2], [items[2]], items[3:]]


def test_pairs_of_all_types_stay_together() -> None:
    action = hosted.LocalShellAction(["ls"], {})
    items: list[Item | Unknown] = [
        hosted.LocalShellCall("call_1", action, "lsc_1", "completed"),
        hosted.LocalShellCallOutput("call_1", "a.txt"),
        hosted.McpApprovalRequest("mcpr_1", "{}", "look", "acme"),
        hosted.McpApprovalResponse("mcpr_1", True),
        Unknown(b'{"type":"acme_call","call_id":"c"}'),
        Unknown(b'{"type":"acme_call_output","call_id":"c"}'),
        hosted.ToolSearchCall({}, call_id="t"),
        hosted.ToolSearchOutput([], call_id="t"),
    ]
    assert split_steps(items) == [items[:2], items[2:4], items[4:6], items[6:]]


def test_undecodable_unknown_call_is_a_step() -> None:
    deep = Unknown(b'{"type":"acme_call","x":%b,"call_id":"c"}' % (b"[" * 100_000 + b"]" * 100_000))
    assert split_steps([user("a"), deep, user("b")]) == [[user("a")], [deep], [user("b")]]


def test_call_without_an_output_does_not_extend_its_step() -> None:
    items: list[Item | Unknown] = [user("a"), call("1"), call("2")]
    assert split_steps(items) == [[items[0]], [items[1]], [items[2]]]


def test_outputs_and_later_messages_are_one_unread_step() -> None:
    items: list[Item | Unknown] = [assistant("a"), call("1"), output("1", "x"), user("b"), user("c")]
    assert join_unread_steps(split_steps(items)) == [items[:1], items[1:]]


def test_model_output_is_not_in_the_unread_step() -> None:
    items: list[Item | Unknown] = [call("1"), output("1", "x"), assistant("a"), user("b"), user("c")]
    assert join_unread_steps(split_steps(items)) == [items[:2], items[2:3], items[3:]]


def test_steps_without_unread_items_stay_unchanged() -> None:
    items: list[Item | Unknown] = [user("a"), call("1"), output("1", "x")]
    assert join_unread_steps(split_steps(items)) == split_steps(items)
    assert join_unread_steps([]) == []


def test_pair_calls_puts_each_call_with_its_output() -> None:
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


@given(st.lists(kinds, max_size=20))
def test_splitting_loses_nothing_and_separates_no_pair(drawn: list[str]) -> None:
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


# Selection


LARGE = SizeLimits(100_000, 100_000)
SMALL = SizeLimits(4_000, 4_000)

CLICK = ComputerCall("s", [], "cu", "completed", actions=[{"type": "screenshot"}])
SCREENSHOT = ComputerCallOutput("s", ComputerScreenshot(image_url="data:,x"))
NO_SCREENSHOT = Message(
    "user",
    [InputText("[there was no room for what stood here, and it was left out: computer_call, computer_call_output]")],
)


def long(word: str) -> str:
    return f"{word} " * 200


def test_items_that_fit_leave_nothing_to_summarise() -> None:
    items: list[Item | Unknown] = [user("task"), call("c"), output("c", "x"), assistant("done"), user("next")]
    assert select_items(items, LARGE) == SelectedItems([], items, [])


def test_selecting_from_no_items_returns_none() -> None:
    assert select_items([], LARGE) == SelectedItems([], [], [])


def test_task_and_last_steps_stay_and_the_rest_is_summarised() -> None:
    older: list[Item | Unknown] = [user("task"), *(assistant(long(f"step{number}")) for number in range(9))]
    last: list[Item | Unknown] = [call("c"), output("c", "x"), user("next")]
    assert select_items([*older, *last], SMALL) == SelectedItems([user("task")], last, older)


def test_latest_question_stays_over_many_steps() -> None:
    steps = [item for number in range(30) for item in (call(str(number)), output(str(number), "x" * 150))]
    items: list[Item | Unknown] = [user("task"), assistant("done"), user("now this"), *steps]
    chosen = select_items(items, SMALL)
    assert chosen.first == [user("task"), user("now this")]
    assert chosen.last == steps[-len(chosen.last) :]


def test_long_task_is_clipped_and_summarised() -> None:
    items: list[Item | Unknown] = [user(long("task") * 20), *(assistant(long("x")) for _ in range(9)), user("next")]
    chosen = select_items(items, SMALL)
    (task,) = chosen.first
    assert isinstance(task, Message)
    assert len(extract_text(task.content)) <= SMALL.soft // 8
    assert chosen.rest[0] is items[0]


def test_huge_output_is_clipped_and_stays_with_its_call() -> None:
    items: list[Item | Unknown] = [user("task"), call("c"), output("c", "x" * 10**6)]
    chosen = select_items(items, SMALL)
    assert (chosen.first, chosen.last[0]) == ([user("task")], call("c"))
    clipped = chosen.last[1]
    assert isinstance(clipped, FunctionCallOutput)
    assert clipped.call_id == "c"
    assert "characters were cut here" in extract_text(clipped.output)


def test_reasoning_without_room_is_dropped_and_its_call_stays() -> None:
    thought = Reasoning(id="rs_1", encrypted_content="x" * 10**5)
    items: list[Item | Unknown] = [user("task"), thought, call("c"), output("c", "x")]
    assert select_items(items, SMALL).last == [user("task"), call("c"), output("c", "x")]


def test_last_question_may_use_half_of_the_space() -> None:
    question = user("why? " * 360)
    assert select_items([user("task"), assistant(long("x")), question], SMALL).last[-1] is question


def test_screenshot_stays_and_long_outputs_are_clipped() -> None:
    calls: list[Item | Unknown] = [call("a"), call("b"), CLICK]
    unread = [output("a", "x" * 8_000), output("b", "y" * 8_000), SCREENSHOT]
    chosen = select_items(
        [user("task"), *(assistant(long("x")) for _ in range(9)), *calls, *unread], SizeLimits(36_000, 12_000)
    )
    assert (chosen.last[:3], chosen.last[5:]) == (calls, [SCREENSHOT])
    for clipped, letter in zip(chosen.last[3:5], "xy", strict=True):
        assert isinstance(clipped, FunctionCallOutput)
        assert extract_text(clipped.output).count(letter) > 1_500
    assert sum(map(measure_item, chosen.last)) <= 9_000


@pytest.mark.parametrize("after", [[], [user("go on")]])
def test_screenshot_without_room_leaves_a_note(after: list[Item | Unknown]) -> None:
    items: list[Item | Unknown] = [CLICK, call("a"), SCREENSHOT, output("a", "x"), *after]
    chosen = select_items([user("task"), assistant("ok"), *items], SMALL)
    task, answer = user("task"), assistant("ok")
    assert chosen == SelectedItems(
        [], [task, answer, call("a"), output("a", "x"), NO_SCREENSHOT, *after], [CLICK, SCREENSHOT]
    )


def test_reasoning_is_dropped_with_the_item_after_it() -> None:
    items: list[Item | Unknown] = [Reasoning(id="rs_1", encrypted_content="x"), CLICK, SCREENSHOT]
    assert select_items(items, SMALL).last == [NO_SCREENSHOT]


def test_gap_note_is_not_a_question() -> None:
    steps = [item for number in range(30) for item in (call(str(number)), output(str(number), "x" * 150))]
    items: list[Item | Unknown] = [user("task"), assistant("done"), user("now this"), NO_SCREENSHOT, *steps]
    assert select_items(items, SMALL).first == [user("task"), user("now this")]


def test_output_before_a_long_message_stays() -> None:
    unread: list[Item | Unknown] = [call("c"), output("c", "x" * 40), user("note " * 800)]
    items: list[Item | Unknown] = [user("task"), *(assistant(long("x")) for _ in range(9)), *unread]
    assert select_items(items, SizeLimits(36_000, 12_000)).last == unread
    clipped = select_items(items, SMALL).last
    assert clipped[:2] == unread[:2]
    note = clipped[2]
    assert isinstance(note, Message)
    assert "characters were cut here" in extract_text(note.content)


def test_first_and_last_of_many_messages_stay() -> None:
    items: list[Item | Unknown] = [user(f"message {number:04}") for number in range(5_000)]
    chosen = select_items(items, SMALL)
    assert (chosen.first, chosen.last[1:]) == (items[:1], items[-len(chosen.last) + 1 :])
    assert sum(map(measure_item, chosen.last)) <= SMALL.hard // 2 + 300


sizes = st.sampled_from([0, 40, 900, 8_000])


@given(st.lists(sizes, max_size=4), st.booleans(), st.lists(sizes, max_size=2), st.sampled_from([2_000, 8_000, 40_000]))
def test_removed_unread_items_always_leave_a_note(
    outputs: list[int], screenshot: bool, messages: list[int], size: int
) -> None:
    pairs = [(call(str(number)), output(str(number), "o" * length)) for number, length in enumerate(outputs)]
    called: list[Item | Unknown] = [one for one, _ in pairs]
    unread: list[Item | Unknown] = [*(other for _, other in pairs), *(user("u" * length) for length in messages)]
    seen: tuple[list[Item | Unknown], list[Item | Unknown]] = ([CLICK], [SCREENSHOT]) if screenshot else ([], [])
    chosen = select_items([user("task"), assistant("ok"), *seen[0], *called, *seen[1], *unread], SizeLimits(size, size))
    retained = [getattr(item, "call_id", None) for item in chosen.last]
    noted = any("left out" in extract_text(item.content) for item in chosen.last if isinstance(item, Message))
    for call_id in [str(number) for number in range(len(outputs))] + ["s"] * screenshot:
        assert retained.count(call_id) == 2 or (retained.count(call_id) == 0 and noted)
    assert sum(map(measure_item, chosen.last)) <= size // 2 + 600
