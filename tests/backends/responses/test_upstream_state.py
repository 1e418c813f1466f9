"""What the upstream has kept is found again by what was said."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from antiphon.backends.base import Turn
from antiphon.backends.responses.request import Continuation
from antiphon.backends.responses.upstream_state import Memory
from antiphon.protocol import codec
from antiphon.protocol.content import InputText, OutputText
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.items import FunctionCall, FunctionCallOutput, Message, Reasoning
from antiphon.protocol.request import CreateRequest

ASKED = Message("user", [InputText("one")], "msg_1", "completed")
ANSWERED = Message("assistant", [OutputText("two")], "msg_2", "completed")
NEXT = Message("user", [InputText("three")], "msg_3", "completed")
# As the upstream told it, under its own id.
OUTPUT = [Raw(codec.encode(Message("assistant", [OutputText("two")], "msg_up", "completed")))]


def make_turn(*items: Any, project: str = "") -> Turn:
    return Turn(request=CreateRequest(model="m"), items=list(items), project=project)


def test_a_turn_goes_on_from_the_response_it_continues() -> None:
    memory = Memory()
    memory.learn(make_turn(ASKED), "resp_up", OUTPUT)
    assert memory.find(make_turn(ASKED, ANSWERED, NEXT)) == Continuation("resp_up", [NEXT])
    assert memory.find(make_turn(ASKED, ANSWERED)) == Continuation("resp_up", [])


def test_reasoning_is_upstream_too() -> None:
    memory = Memory()
    thought = Raw(codec.encode(Reasoning([], "rs_up", None, "theirs")))
    memory.learn(make_turn(ASKED), "resp_up", [thought, *OUTPUT])
    turn = make_turn(ASKED, Reasoning([], "rs_1", None, "ours"), ANSWERED, NEXT)
    assert memory.find(turn) == Continuation("resp_up", [NEXT])


def test_the_newest_response_counts() -> None:
    memory = Memory()
    call = FunctionCall("call_1", "f", "{}", "fc_1", "completed")
    output = FunctionCallOutput("7", "call_1", "fco_1", "completed")
    memory.learn(make_turn(ASKED), "resp_1", [Raw(codec.encode(call))])
    memory.learn(make_turn(ASKED, call, output), "resp_2", OUTPUT)
    assert memory.find(make_turn(ASKED, call, output, ANSWERED, NEXT)) == Continuation("resp_2", [NEXT])
    assert memory.find(make_turn(ASKED, call, NEXT)) == Continuation("resp_1", [NEXT])


def test_another_answer_another_question_or_another_project_is_not_found() -> None:
    memory = Memory()
    memory.learn(make_turn(ASKED, project="a"), "resp_up", OUTPUT)
    other = Message("assistant", [OutputText("2")], "msg_2", "completed")
    assert memory.find(make_turn(ASKED, other, NEXT, project="a")) is None
    assert memory.find(make_turn(NEXT, ANSWERED, ASKED, project="a")) is None
    assert memory.find(make_turn(ASKED, ANSWERED, NEXT, project="b")) is None


def test_pictures_that_were_drawn_for_the_same_words_are_not_taken_for_each_other() -> None:
    memory = Memory()
    for number in (1, 2):
        drawn = {
            "type": "image_generation_call",
            "id": f"ig_{number}",
            "status": "completed",
            "result": f"cGlj{number}",
        }
        memory.learn(make_turn(ASKED), f"resp_{number}", [Raw(codec.encode(drawn))])
    kept = ImageGenerationCall("ig_here", "completed", "cGlj1")
    assert memory.find(make_turn(ASKED, kept, NEXT)) == Continuation("resp_1", [NEXT])


def test_an_answer_that_says_nothing_is_not_what_the_next_who_asks_goes_on_from() -> None:
    memory = Memory()
    memory.learn(make_turn(ASKED), "resp_1", [])
    memory.learn(make_turn(ASKED), "resp_2", [Raw(codec.encode(Reasoning([], "rs_up", None, "theirs")))])
    assert memory.find(make_turn(ASKED)) is None


def test_a_response_without_an_id_cannot_be_continued() -> None:
    memory = Memory()
    memory.learn(make_turn(ASKED), "", OUTPUT)
    assert memory.find(make_turn(ASKED, ANSWERED, NEXT)) is None


def test_what_the_upstream_has_lost_is_forgotten() -> None:
    memory = Memory()
    memory.learn(make_turn(ASKED), "resp_up", OUTPUT)
    turn = make_turn(ASKED, ANSWERED, NEXT)
    found = memory.find(turn)
    assert found is not None
    memory.forget(found)
    assert memory.find(turn) is None


def test_the_oldest_are_forgotten_first() -> None:
    memory = Memory(most=2)
    asked = [Message("user", str(number)) for number in range(3)]
    memory.learn(make_turn(asked[0]), "resp_0", OUTPUT)
    memory.learn(make_turn(asked[1]), "resp_1", OUTPUT)
    assert memory.find(make_turn(asked[0], ANSWERED)) is not None
    memory.learn(make_turn(asked[2]), "resp_2", OUTPUT)
    kept = [memory.find(make_turn(each, ANSWERED)) is not None for each in asked]
    assert kept == [True, False, True]


@given(st.lists(st.lists(st.text(max_size=3), min_size=1, max_size=3), min_size=1, max_size=5))
def test_nothing_is_sent_twice_and_nothing_is_left_out(rounds: list[list[str]]) -> None:
    memory = Memory()
    said: list[Any] = []
    for number, words in enumerate(rounds):
        new = [Message("user", [InputText(word)]) for word in words]
        continuation = memory.find(make_turn(*said, *new))
        if number:
            assert continuation == Continuation(f"resp_{number - 1}", new)
        memory.learn(make_turn(*said, *new), f"resp_{number}", OUTPUT)
        said += [*new, ANSWERED]
