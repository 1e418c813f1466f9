"""Lookup of stored upstream responses by their content."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from antiphon.backends.base import Turn
from antiphon.backends.responses.request import PreviousResponse
from antiphon.backends.responses.upstream_state import UpstreamState
from antiphon.protocol import codec
from antiphon.protocol.content import InputText, OutputText
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.items import FunctionCall, FunctionCallOutput, Message, Reasoning
from antiphon.protocol.request import CreateRequest

FIRST = Message("user", [InputText("one")], "msg_1", "completed")
ANSWER = Message("assistant", [OutputText("two")], "msg_2", "completed")
NEXT = Message("user", [InputText("three")], "msg_3", "completed")
# The upstream's form of ANSWER, with its own id.
OUTPUT = [Raw(codec.encode(Message("assistant", [OutputText("two")], "msg_up", "completed")))]


def make_turn(*items: Any, project: str = "") -> Turn:
    return Turn(request=CreateRequest(model="m"), items=list(items), project=project)


def test_turn_continues_its_stored_response() -> None:
    state = UpstreamState()
    state.add(make_turn(FIRST), "resp_up", OUTPUT)
    assert state.find_previous(make_turn(FIRST, ANSWER, NEXT)) == PreviousResponse("resp_up", [NEXT])
    assert state.find_previous(make_turn(FIRST, ANSWER)) == PreviousResponse("resp_up", [])


def test_reasoning_is_ignored_in_the_lookup() -> None:
    state = UpstreamState()
    thought = Raw(codec.encode(Reasoning([], "rs_up", None, "theirs")))
    state.add(make_turn(FIRST), "resp_up", [thought, *OUTPUT])
    turn = make_turn(FIRST, Reasoning([], "rs_1", None, "ours"), ANSWER, NEXT)
    assert state.find_previous(turn) == PreviousResponse("resp_up", [NEXT])


def test_newest_response_is_found() -> None:
    state = UpstreamState()
    call = FunctionCall("call_1", "f", "{}", "fc_1", "completed")
    output = FunctionCallOutput("7", "call_1", "fco_1", "completed")
    state.add(make_turn(FIRST), "resp_1", [Raw(codec.encode(call))])
    state.add(make_turn(FIRST, call, output), "resp_2", OUTPUT)
    assert state.find_previous(make_turn(FIRST, call, output, ANSWER, NEXT)) == PreviousResponse("resp_2", [NEXT])
    assert state.find_previous(make_turn(FIRST, call, NEXT)) == PreviousResponse("resp_1", [NEXT])


def test_other_answer_input_or_project_is_not_found() -> None:
    state = UpstreamState()
    state.add(make_turn(FIRST, project="a"), "resp_up", OUTPUT)
    other = Message("assistant", [OutputText("2")], "msg_2", "completed")
    assert state.find_previous(make_turn(FIRST, other, NEXT, project="a")) is None
    assert state.find_previous(make_turn(NEXT, ANSWER, FIRST, project="a")) is None
    assert state.find_previous(make_turn(FIRST, ANSWER, NEXT, project="b")) is None


def test_answers_with_different_images_stay_separate() -> None:
    state = UpstreamState()
    for number in (1, 2):
        drawn = {
            "type": "image_generation_call",
            "id": f"ig_{number}",
            "status": "completed",
            "result": f"cGlj{number}",
        }
        state.add(make_turn(FIRST), f"resp_{number}", [Raw(codec.encode(drawn))])
    stored = ImageGenerationCall("ig_here", "completed", "cGlj1")
    assert state.find_previous(make_turn(FIRST, stored, NEXT)) == PreviousResponse("resp_1", [NEXT])


def test_empty_answer_is_not_recorded() -> None:
    state = UpstreamState()
    state.add(make_turn(FIRST), "resp_1", [])
    state.add(make_turn(FIRST), "resp_2", [Raw(codec.encode(Reasoning([], "rs_up", None, "theirs")))])
    assert state.find_previous(make_turn(FIRST)) is None


def test_response_without_id_is_not_recorded() -> None:
    state = UpstreamState()
    state.add(make_turn(FIRST), "", OUTPUT)
    assert state.find_previous(make_turn(FIRST, ANSWER, NEXT)) is None


def test_lost_response_is_forgotten() -> None:
    state = UpstreamState()
    state.add(make_turn(FIRST), "resp_up", OUTPUT)
    turn = make_turn(FIRST, ANSWER, NEXT)
    found = state.find_previous(turn)
    assert found is not None
    state.forget(found)
    assert state.find_previous(turn) is None


def test_oldest_responses_are_evicted() -> None:
    state = UpstreamState(max_responses=2)
    messages = [Message("user", str(number)) for number in range(3)]
    state.add(make_turn(messages[0]), "resp_0", OUTPUT)
    state.add(make_turn(messages[1]), "resp_1", OUTPUT)
    assert state.find_previous(make_turn(messages[0], ANSWER)) is not None
    state.add(make_turn(messages[2]), "resp_2", OUTPUT)
    found = [state.find_previous(make_turn(each, ANSWER)) is not None for each in messages]
    assert found == [True, False, True]


@given(st.lists(st.lists(st.text(max_size=3), min_size=1, max_size=3), min_size=1, max_size=5))
def test_each_item_is_sent_exactly_once(rounds: list[list[str]]) -> None:
    state = UpstreamState()
    history: list[Any] = []
    for number, words in enumerate(rounds):
        new = [Message("user", [InputText(word)]) for word in words]
        previous = state.find_previous(make_turn(*history, *new))
        if number:
            assert previous == PreviousResponse(f"resp_{number - 1}", new)
        state.add(make_turn(*history, *new), f"resp_{number}", OUTPUT)
        history += [*new, ANSWER]
