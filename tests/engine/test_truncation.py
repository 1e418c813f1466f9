"""`truncation: auto`."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.base import Capabilities, Deltas, Model, Turn
from antiphon.engine.truncation import split_turns, start_turn
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol.content import text_of
from antiphon.protocol.items import FunctionCall, FunctionCallOutput, Item, Message
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest
from engine_bench import Bench

SYSTEM = Message("system", "Be kind.")
CALL = FunctionCall("c", "f", "{}")
OUTPUT = FunctionCallOutput("x", "c")


def user(text: str) -> Message:
    return Message("user", text)


def test_a_turn_begins_with_a_user_message_and_system_messages_belong_to_none() -> None:
    items = [SYSTEM, user("1"), Message("assistant", "a"), user("2"), CALL, OUTPUT, user("3")]
    assert split_turns(items) == [[1, 2], [3, 4, 5], [6]]


def test_turns_that_share_a_call_and_its_output_are_one() -> None:
    assert split_turns([user("1"), CALL, user("2"), OUTPUT, user("3")]) == [[0, 1, 2, 3], [4]]


def test_turns_stay_one_when_another_call_of_theirs_is_answered_later() -> None:
    other, answer = FunctionCall("d", "f", "{}"), FunctionCallOutput("y", "d")
    items = [user("0"), user("1"), CALL, user("2"), other, user("3"), OUTPUT, user("4"), answer, user("5")]
    assert split_turns(items) == [[0], [1, 2, 3, 4, 5, 6, 7, 8], [9]]


@given(st.lists(st.sampled_from(["user", "assistant", "system", "call", "output"]), max_size=15))
def test_splitting_loses_nothing_but_system_messages(kinds: list[str]) -> None:
    make = {"call": lambda: CALL, "output": lambda: OUTPUT}
    items: list[Any] = [make.get(kind, lambda kind=kind: Message(kind, "x"))() for kind in kinds]
    covered = [index for block in split_turns(items) for index in block]
    assert covered == [index for index, kind in enumerate(kinds) if kind != "system"]


class Narrow:
    """A backend with room for so many words."""

    capabilities = Capabilities()

    def __init__(self, room: int, *, says_so: bool = True) -> None:
        self._room = room
        self._window = room if says_so else None
        self.read: list[str] = []
        self.project = ""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def models(self) -> Sequence[Model]:
        return [Model(id="narrow", created=0, owned_by="test", context_window=self._window)]

    async def count_tokens(self, turn: Turn) -> int:
        return sum(len(_text(item).split()) for item in turn.items)

    async def stream(self, turn: Turn) -> Deltas:
        if await self.count_tokens(turn) + (turn.request.max_output_tokens or 1) > self._room:
            raise ContextLengthExceeded("too long", param="input")
        self.read, self.project = [_text(item) for item in turn.items], turn.project
        return _nothing()


async def _nothing() -> Deltas:
    return
    yield []


def _text(item: Item | Unknown) -> str:
    return text_of(item.content) if isinstance(item, Message) else "a call"


TURNS: list[Item | Unknown] = [SYSTEM, *(user(f"turn {number} of five") for number in range(1, 6))]


@pytest.mark.parametrize("says_so", [True, False])
async def test_as_few_turns_go_as_must_and_never_the_system_message(says_so: bool) -> None:
    backend = Narrow(2 + 2 * 4 + 1, says_so=says_so)
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto"), items=TURNS)
    started = await start_turn(backend, turn)
    assert (started.dropped, backend.read) == (3, ["Be kind.", "turn 4 of five", "turn 5 of five"])


async def test_a_shortened_turn_is_still_its_projects() -> None:
    backend = Narrow(2 + 2 * 4 + 1)
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto"), items=TURNS, project="acme")
    await start_turn(backend, turn)
    assert backend.project == "acme"


async def test_the_room_for_the_answer_counts() -> None:
    backend = Narrow(2 + 2 * 4 + 1)
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto", max_output_tokens=5), items=TURNS)
    assert (await start_turn(backend, turn)).dropped == 4


async def test_what_does_not_fit_even_alone_is_refused() -> None:
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto"), items=TURNS)
    with pytest.raises(ContextLengthExceeded):
        await start_turn(Narrow(3), turn)


async def test_nothing_is_dropped_unless_it_may_be() -> None:
    for truncation in (None, "disabled"):
        turn = Turn(request=CreateRequest(model="narrow", truncation=truncation), items=TURNS)
        with pytest.raises(ContextLengthExceeded):
            await start_turn(Narrow(10), turn)


async def test_a_turn_that_fits_is_not_touched(bench: Bench) -> None:
    assert (await bench.answer("hello", truncation="auto")).output_text == "You said: hello"
