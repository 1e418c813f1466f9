"""What stays word for word."""

from antiphon.engine.compaction.selection import Room, Selection, select
from antiphon.protocol.content import text_of
from antiphon.protocol.items import FunctionCallOutput, Item, Message, Reasoning
from antiphon.protocol.open import Unknown
from compaction_bench import assistant, call, output, user

LARGE = Room(100_000, 100_000)
SMALL = Room(4_000, 4_000)


def long(word: str) -> str:
    return f"{word} " * 200


def test_what_has_room_stays_and_leaves_nothing_to_tell() -> None:
    items: list[Item | Unknown] = [user("task"), call("c"), output("c", "x"), assistant("done"), user("next")]
    assert select(items, LARGE) == Selection([], items, [])


def test_nothing_is_nothing() -> None:
    assert select([], LARGE) == Selection([], [], [])


def test_the_task_stays_with_the_last_steps_and_the_rest_is_to_be_told() -> None:
    older: list[Item | Unknown] = [user("task"), *(assistant(long(f"step{number}")) for number in range(9))]
    last: list[Item | Unknown] = [call("c"), output("c", "x"), user("next")]
    assert select([*older, *last], SMALL) == Selection([user("task")], last, older)


def test_the_question_at_hand_stays_however_many_steps_ago_it_was_asked() -> None:
    steps = [item for number in range(30) for item in (call(str(number)), output(str(number), "x" * 150))]
    items: list[Item | Unknown] = [user("task"), assistant("done"), user("now this"), *steps]
    chosen = select(items, SMALL)
    assert chosen.first == [user("task"), user("now this")]
    assert chosen.last == steps[-len(chosen.last) :]


def test_a_long_task_is_clipped_and_told() -> None:
    items: list[Item | Unknown] = [user(long("task") * 20), *(assistant(long("x")) for _ in range(9)), user("next")]
    chosen = select(items, SMALL)
    (task,) = chosen.first
    assert isinstance(task, Message)
    assert len(text_of(task.content)) <= SMALL.soft // 8
    assert chosen.rest[0] is items[0]


def test_a_huge_output_is_clipped_and_not_parted_from_its_call() -> None:
    items: list[Item | Unknown] = [user("task"), call("c"), output("c", "x" * 10**6)]
    chosen = select(items, SMALL)
    assert (chosen.first, chosen.last[0]) == ([user("task")], call("c"))
    clipped = chosen.last[1]
    assert isinstance(clipped, FunctionCallOutput)
    assert clipped.call_id == "c"
    assert "characters were cut here" in text_of(clipped.output)


def test_a_thought_without_room_goes_and_its_call_stays() -> None:
    thought = Reasoning(id="rs_1", encrypted_content="x" * 10**5)
    items: list[Item | Unknown] = [user("task"), thought, call("c"), output("c", "x")]
    assert select(items, SMALL).last == [user("task"), call("c"), output("c", "x")]


def test_the_last_question_may_take_half_of_the_room() -> None:
    question = user("why? " * 360)
    assert select([user("task"), assistant(long("x")), question], SMALL).last[-1] is question
