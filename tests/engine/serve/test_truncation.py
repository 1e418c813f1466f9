"""`truncation: auto`."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.engine.serve.truncation import Truncation, find_droppable
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol.content import extract_text
from antiphon.protocol.items import FunctionCall, FunctionCallOutput, Item, Message, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Deltas
from support.engine_harness import EngineHarness

SYSTEM = Message("system", "Be kind.")
CALL = FunctionCall("c", "f", "{}")
OUTPUT = FunctionCallOutput("x", "c")


def user(text: str) -> Message:
    return Message("user", text)


def call(number: int) -> FunctionCall:
    return FunctionCall(f"c{number}", "f", "{}")


def output(number: int) -> FunctionCallOutput:
    return FunctionCallOutput("x", f"c{number}")


def test_turn_begins_with_user_message_and_excludes_system_messages() -> None:
    items = [SYSTEM, user("1"), Message("assistant", "a"), user("2"), CALL, OUTPUT, user("3")]
    assert find_droppable(items) == [[1, 2], [3, 4, 5]]


def test_turns_that_share_call_and_output_are_one_block() -> None:
    assert find_droppable([user("1"), CALL, user("2"), OUTPUT, user("3")]) == [[0, 1, 2, 3]]


def test_turns_with_later_answered_call_are_one_block() -> None:
    other, answer = FunctionCall("d", "f", "{}"), FunctionCallOutput("y", "d")
    items = [user("0"), user("1"), CALL, user("2"), other, user("3"), OUTPUT, user("4"), answer, user("5")]
    assert find_droppable(items) == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]


def test_last_turn_drops_steps_last_but_keeps_question_and_last_step() -> None:
    thought = Reasoning([], "rs_1")
    items = [user("1"), Message("assistant", "a"), user("2"), thought, call(1), output(1), thought, call(2), output(2)]
    assert find_droppable([*items, call(3), output(3)]) == [[0, 1], [3, 4, 5], [6, 7, 8]]


def test_parallel_calls_are_one_step() -> None:
    items = [user("1"), call(1), call(2), output(2), output(1), Message("assistant", "So"), call(3), output(3)]
    assert find_droppable(items) == [[1, 2, 3, 4]]


def test_steps_that_share_call_and_output_are_one_block() -> None:
    items = [user("1"), call(1), call(2), output(1), call(3), output(3), output(2), call(4), output(4)]
    assert find_droppable(items) == [[1, 2, 3, 4, 5, 6]]


@given(st.lists(st.sampled_from(["user", "assistant", "system", "call 1", "call 2", "out 1", "out 2"]), max_size=15))
def test_droppable_blocks_are_disjoint_and_keep_pairs_together(kinds: list[str]) -> None:
    known: dict[str, Item] = {"call 1": call(1), "call 2": call(2), "out 1": output(1), "out 2": output(2)}
    items: list[Item | Unknown] = [known.get(kind) or Message(kind, "x") for kind in kinds]
    blocks = find_droppable(items)
    gone: set[int] = set()
    for block in blocks:
        assert block
        assert not gone & set(block)
        gone |= set(block)
        retained = [item for index, item in enumerate(items) if index not in gone]
        assert all(item in retained for item in items if isinstance(item, Message) and item.role == "system")
        assert _parted(retained) <= _parted(items)
        assert "user" not in kinds or any(isinstance(item, Message) and item.role == "user" for item in retained)


def _parted(items: list[Item | Unknown]) -> int:
    """Count the outputs without an earlier call."""
    seen: set[str] = set()
    parted = 0
    for item in items:
        if isinstance(item, FunctionCall):
            seen.add(item.call_id)
        elif isinstance(item, FunctionCallOutput):
            parted += item.call_id not in seen
    return parted


class Narrow:
    """A backend whose window is a number of words."""

    capabilities = Capabilities()

    def __init__(self, room: int, *, says_so: bool = True) -> None:
        self._room = room
        self._window = room if says_so else None
        self.read: list[str] = []
        self.project = ""
        self.calls = 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def models(self) -> Sequence[Model]:
        return [Model(id="narrow", created=0, owned_by="test", context_window=self._window)]

    async def count_tokens(self, turn: Turn) -> int:
        return sum(len(_text(item).split()) for item in turn.items)

    async def stream(self, turn: Turn) -> Deltas:
        self.calls += 1
        if await self.count_tokens(turn) + (turn.request.max_output_tokens or 1) > self._room:
            raise ContextLengthExceeded("too long", param="input")
        self.read, self.project = [_text(item) for item in turn.items], turn.project
        return _nothing()


async def _nothing() -> Deltas:
    return
    yield []


def _text(item: Item | Unknown) -> str:
    return extract_text(item.content) if isinstance(item, Message) else "a call"


TURNS: list[Item | Unknown] = [SYSTEM, *(user(f"turn {number} of five") for number in range(1, 6))]


async def count_dropped(backend: Narrow, turn: Turn) -> int:
    """Start the turn and return the number of items that its warning says were dropped."""
    await Truncation(backend).stream(turn)
    (warning,) = turn.warnings
    found = re.fullmatch(r"truncation: the (\d+) oldest items were left out", warning)
    assert found is not None
    return int(found[1])


async def test_fewest_turns_are_dropped_and_system_message_stays() -> None:
    backend = Narrow(2 + 2 * 4 + 1)
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto"), items=TURNS)
    dropped = await count_dropped(backend, turn)
    assert (dropped, backend.read) == (3, ["Be kind.", "turn 4 of five", "turn 5 of five"])


async def test_unknown_window_is_searched_with_growing_steps() -> None:
    backend = Narrow(2 + 40 * 4 + 1, says_so=False)
    requested = [SYSTEM, *(user(f"turn {number} of many") for number in range(100))]
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto"), items=requested)
    dropped = await count_dropped(backend, turn)
    assert (dropped, backend.calls) == (64, 8)


async def test_backend_window_applies_to_unlisted_models() -> None:
    backend = Narrow(2 + 40 * 4 + 1, says_so=False)
    backend.capabilities = Capabilities(context_window=2 + 40 * 4 + 1)
    requested = [SYSTEM, *(user(f"turn {number} of many") for number in range(100))]
    turn = Turn(request=CreateRequest(model="another", truncation="auto"), items=requested)
    dropped = await count_dropped(backend, turn)
    assert (dropped, backend.calls) == (60, 2)
    assert await Truncation(backend).count_tokens(turn) == 2 + 40 * 4


async def test_long_tool_loop_keeps_question_and_last_steps() -> None:
    loop: list[Item | Unknown] = [each for number in range(10) for each in (call(number), output(number))]
    backend = Narrow(2 + 4 + 3 * 4 + 1)
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto"), items=[*TURNS, *loop])
    dropped = await count_dropped(backend, turn)
    assert (dropped, backend.read) == (4 + 14, ["Be kind.", "turn 5 of five", *["a call"] * 6])


async def test_shortened_turn_keeps_project() -> None:
    backend = Narrow(2 + 2 * 4 + 1)
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto"), items=TURNS, project="acme")
    await Truncation(backend).stream(turn)
    assert backend.project == "acme"


async def test_output_tokens_reserve_room() -> None:
    backend = Narrow(2 + 2 * 4 + 1)
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto", max_output_tokens=5), items=TURNS)
    assert await count_dropped(backend, turn) == 4


async def test_large_max_output_tokens_reserves_quarter_of_window() -> None:
    backend = Narrow(21)
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto", max_output_tokens=10_000), items=TURNS)
    counted = await Truncation(backend).count_tokens(turn)
    assert counted == 2 + 3 * 4


@pytest.mark.parametrize(("truncation", "counted"), [("auto", 2 + 2 * 4), (None, 2 + 5 * 4)])
async def test_count_matches_shortened_turn(truncation: Any, counted: int) -> None:
    turn = Turn(request=CreateRequest(model="narrow", truncation=truncation), items=TURNS)
    assert await Truncation(Narrow(2 + 2 * 4 + 1)).count_tokens(turn) == counted


async def test_last_turn_that_does_not_fit_is_refused() -> None:
    turn = Turn(request=CreateRequest(model="narrow", truncation="auto"), items=TURNS)
    with pytest.raises(ContextLengthExceeded):
        await Truncation(Narrow(3)).stream(turn)


async def test_nothing_is_dropped_without_truncation_auto() -> None:
    for truncation in (None, "disabled"):
        turn = Turn(request=CreateRequest(model="narrow", truncation=truncation), items=TURNS)
        with pytest.raises(ContextLengthExceeded):
            await Truncation(Narrow(10)).stream(turn)


async def test_fitting_turn_is_unchanged(harness: EngineHarness) -> None:
    assert (await harness.answer("hello", truncation="auto")).output_text == "You said: hello"
