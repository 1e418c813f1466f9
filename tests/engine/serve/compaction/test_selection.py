"""What stays word for word."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.serve.compaction.clipping import measure_item
from antiphon.engine.serve.compaction.selection import SelectedItems, SizeLimits, select_items
from antiphon.protocol.content import ComputerScreenshot, InputText, extract_text
from antiphon.protocol.hosted import ComputerCall, ComputerCallOutput
from antiphon.protocol.items import FunctionCallOutput, Item, Message, Reasoning
from antiphon.protocol.unions import Unknown
from support.compaction import assistant, call, output, user

LARGE = SizeLimits(100_000, 100_000)
SMALL = SizeLimits(4_000, 4_000)

CLICK = ComputerCall("cu", "s", [], "completed", actions=[{"type": "screenshot"}])
SCREENSHOT = ComputerCallOutput("s", ComputerScreenshot(image_url="data:,x"))
NO_SCREENSHOT = Message(
    "user",
    [InputText("[there was no room for what stood here, and it was left out: computer_call, computer_call_output]")],
)


def long(word: str) -> str:
    return f"{word} " * 200


def test_what_has_room_stays_and_leaves_nothing_to_tell() -> None:
    items: list[Item | Unknown] = [user("task"), call("c"), output("c", "x"), assistant("done"), user("next")]
    assert select_items(items, LARGE) == SelectedItems([], items, [])


def test_nothing_is_nothing() -> None:
    assert select_items([], LARGE) == SelectedItems([], [], [])


def test_the_task_stays_with_the_last_steps_and_the_rest_is_to_be_told() -> None:
    older: list[Item | Unknown] = [user("task"), *(assistant(long(f"step{number}")) for number in range(9))]
    last: list[Item | Unknown] = [call("c"), output("c", "x"), user("next")]
    assert select_items([*older, *last], SMALL) == SelectedItems([user("task")], last, older)


def test_the_question_at_hand_stays_however_many_steps_ago_it_was_asked() -> None:
    steps = [item for number in range(30) for item in (call(str(number)), output(str(number), "x" * 150))]
    items: list[Item | Unknown] = [user("task"), assistant("done"), user("now this"), *steps]
    chosen = select_items(items, SMALL)
    assert chosen.first == [user("task"), user("now this")]
    assert chosen.last == steps[-len(chosen.last) :]


def test_a_long_task_is_clipped_and_told() -> None:
    items: list[Item | Unknown] = [user(long("task") * 20), *(assistant(long("x")) for _ in range(9)), user("next")]
    chosen = select_items(items, SMALL)
    (task,) = chosen.first
    assert isinstance(task, Message)
    assert len(extract_text(task.content)) <= SMALL.soft // 8
    assert chosen.rest[0] is items[0]


def test_a_huge_output_is_clipped_and_not_parted_from_its_call() -> None:
    items: list[Item | Unknown] = [user("task"), call("c"), output("c", "x" * 10**6)]
    chosen = select_items(items, SMALL)
    assert (chosen.first, chosen.last[0]) == ([user("task")], call("c"))
    clipped = chosen.last[1]
    assert isinstance(clipped, FunctionCallOutput)
    assert clipped.call_id == "c"
    assert "characters were cut here" in extract_text(clipped.output)


def test_a_thought_without_room_goes_and_its_call_stays() -> None:
    thought = Reasoning(id="rs_1", encrypted_content="x" * 10**5)
    items: list[Item | Unknown] = [user("task"), thought, call("c"), output("c", "x")]
    assert select_items(items, SMALL).last == [user("task"), call("c"), output("c", "x")]


def test_the_last_question_may_take_half_of_the_room() -> None:
    question = user("why? " * 360)
    assert select_items([user("task"), assistant(long("x")), question], SMALL).last[-1] is question


def test_a_screenshot_beside_long_outputs_stays_and_they_are_clipped() -> None:
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
def test_a_screenshot_without_room_is_noted_and_what_is_beside_it_stays(after: list[Item | Unknown]) -> None:
    items: list[Item | Unknown] = [CLICK, call("a"), SCREENSHOT, output("a", "x"), *after]
    chosen = select_items([user("task"), assistant("ok"), *items], SMALL)
    task, answer = user("task"), assistant("ok")
    assert chosen == SelectedItems(
        [], [task, answer, call("a"), output("a", "x"), NO_SCREENSHOT, *after], [CLICK, SCREENSHOT]
    )


def test_a_thought_that_led_to_nothing_that_stays_goes_too() -> None:
    items: list[Item | Unknown] = [Reasoning(id="rs_1", encrypted_content="x"), CLICK, SCREENSHOT]
    assert select_items(items, SMALL).last == [NO_SCREENSHOT]


def test_a_note_of_what_was_left_out_is_no_question() -> None:
    steps = [item for number in range(30) for item in (call(str(number)), output(str(number), "x" * 150))]
    items: list[Item | Unknown] = [user("task"), assistant("done"), user("now this"), NO_SCREENSHOT, *steps]
    assert select_items(items, SMALL).first == [user("task"), user("now this")]


def test_an_output_stays_before_a_long_message() -> None:
    unread: list[Item | Unknown] = [call("c"), output("c", "x" * 40), user("note " * 800)]
    items: list[Item | Unknown] = [user("task"), *(assistant(long("x")) for _ in range(9)), *unread]
    assert select_items(items, SizeLimits(36_000, 12_000)).last == unread
    clipped = select_items(items, SMALL).last
    assert clipped[:2] == unread[:2]
    note = clipped[2]
    assert isinstance(note, Message)
    assert "characters were cut here" in extract_text(note.content)


def test_of_messages_without_end_the_first_and_the_last_stay() -> None:
    items: list[Item | Unknown] = [user(f"message {number:04}") for number in range(5_000)]
    chosen = select_items(items, SMALL)
    assert (chosen.first, chosen.last[1:]) == (items[:1], items[-len(chosen.last) + 1 :])
    assert sum(map(measure_item, chosen.last)) <= SMALL.hard // 2 + 300


sizes = st.sampled_from([0, 40, 900, 8_000])


@settings(max_examples=60)
@given(st.lists(sizes, max_size=4), st.booleans(), st.lists(sizes, max_size=2), st.sampled_from([2_000, 8_000, 40_000]))
def test_of_what_nobody_has_read_nothing_goes_without_a_note(
    outputs: list[int], screenshot: bool, said: list[int], size: int
) -> None:
    pairs = [(call(str(number)), output(str(number), "o" * length)) for number, length in enumerate(outputs)]
    asked: list[Item | Unknown] = [one for one, _ in pairs]
    unread: list[Item | Unknown] = [*(other for _, other in pairs), *(user("u" * length) for length in said)]
    seen: tuple[list[Item | Unknown], list[Item | Unknown]] = ([CLICK], [SCREENSHOT]) if screenshot else ([], [])
    chosen = select_items([user("task"), assistant("ok"), *seen[0], *asked, *seen[1], *unread], SizeLimits(size, size))
    kept = [getattr(item, "call_id", None) for item in chosen.last]
    noted = any("left out" in extract_text(item.content) for item in chosen.last if isinstance(item, Message))
    for call_id in [str(number) for number in range(len(outputs))] + ["s"] * screenshot:
        assert kept.count(call_id) == 2 or (kept.count(call_id) == 0 and noted)
    assert sum(map(measure_item, chosen.last)) <= size // 2 + 600
