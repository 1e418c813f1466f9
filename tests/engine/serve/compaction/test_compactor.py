"""The compactor: retained items, summary requests, and results that fit the window."""

import asyncio
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.compaction_item import make_summary_message
from antiphon.engine.serve.compaction.compactor import Compactor
from antiphon.errors import ContextLengthExceeded, InvalidRequest, RateLimited
from antiphon.protocol.content import ComputerScreenshot, extract_text
from antiphon.protocol.hosted import ComputerCall, ComputerCallOutput
from antiphon.protocol.items import CompactionTrigger, Item, Message, Reasoning
from antiphon.protocol.request import ContextManagement
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Failure
from support.compaction import (
    SUMMARY,
    CountingBackend,
    assistant,
    call,
    compact,
    lay_out,
    make_turn,
    output,
    user,
    with_items,
)

WINDOW = 2_000
RULE = Message("developer", "Be kind.")
LONG: list[Item | Unknown] = [
    RULE,
    user("build a bridge"),
    *(
        item
        for number in range(40)
        for item in (call(str(number)), output(str(number), "steel " * 30), assistant(f"beam {number} is set"))
    ),
    user("and now?"),
]


@pytest.mark.parametrize("items", [[], [user("hi")], LONG, [CompactionTrigger(), user("hi")]])
@pytest.mark.parametrize("management", [None, []])
async def test_compactor_starts_no_turn_that_it_does_not_apply_to(items: Any, management: Any) -> None:
    turn = make_turn(items)
    turn.request.context_management = management
    compactor = Compactor(Sealer([bytes(32)]))
    assert not compactor.applies_to(turn)
    assert await compactor.start(CountingBackend(WINDOW).route, turn) is None


async def test_compacted_turn_has_task_summary_and_last_steps() -> None:
    backend = CountingBackend(WINDOW)
    turn = make_turn(LONG)
    compacted, _memory = await compact(backend, turn)
    read = with_items(turn, [*LONG, compacted.item]).items
    assert read[:3] == [RULE, user("build a bridge"), make_summary_message(SUMMARY)]
    assert read[3:] == LONG[-len(read[3:]) :]
    assert len(read) > 4
    assert compacted.retained == [RULE, user("build a bridge"), user("and now?")]
    assert compacted.usage == Usage(10, 5, 15)


async def test_summary_is_requested_in_one_message_without_tools() -> None:
    backend = CountingBackend(WINDOW)
    await compact(backend, make_turn(LONG, instructions="Speak like a sailor.", temperature=0.1, tools=[]))
    (requested,) = backend.read
    assert (requested.request.tools, requested.request.temperature, requested.request.store) == (None, 0.1, False)
    assert requested.request.max_output_tokens is not None
    assert requested.request.max_output_tokens <= WINDOW // 8
    (message,) = requested.items
    assert isinstance(message, Message)
    text = extract_text(message.content)
    assert "system: Speak like a sailor." in text
    assert "user: build a bridge" in text
    assert "beam 0 is set" in text


async def test_summary_request_has_tokens_for_reasoning() -> None:
    backend = CountingBackend(WINDOW)
    await compact(backend, make_turn(LONG, reasoning={"effort": "low"}))
    assert (backend.read[0].request.max_output_tokens or 0) > WINDOW // 8


async def test_conversation_that_fits_is_retained_without_a_summary() -> None:
    backend = CountingBackend(10**6)
    compacted, memory = await compact(backend, make_turn(LONG))
    assert (backend.read, memory.summary, memory.list_items()) == ([], "", LONG[1:])
    assert compacted.usage == Usage(0, 0, 0)


async def test_failed_summary_counts_the_tokens_that_were_used() -> None:
    backend = CountingBackend(WINDOW, says=Failure("Out of memory."))
    compacted, memory = await compact(backend, make_turn(LONG))
    assert memory.summary.startswith("(No summary could be written.")
    assert compacted.usage == Usage(10, 5, 15)


@pytest.mark.parametrize("items", [[], [Message("system", "Be kind.")], [CompactionTrigger()]], ids=repr)
async def test_compaction_of_nothing_is_refused(items: list[Item | Unknown]) -> None:
    backend = CountingBackend(WINDOW)
    with pytest.raises(InvalidRequest, match="nothing to compact"):
        await compact(backend, make_turn(items))
    assert backend.read == []


@pytest.mark.parametrize("says", [RuntimeError("boom"), RateLimited("slow down"), "", "  \n"], ids=repr)
async def test_extracts_replace_an_empty_summary(says: Any) -> None:
    _compacted, memory = await compact(CountingBackend(WINDOW, says=says), make_turn(LONG))
    assert memory.summary.startswith("(No summary could be written.")
    assert "user: build a bridge" in memory.summary


async def test_extracts_are_deterministic() -> None:
    made = [await compact(CountingBackend(WINDOW, says=RuntimeError("boom")), make_turn(LONG)) for _ in range(2)]
    assert made[0] == made[1]


async def test_extracts_replace_a_summary_that_times_out() -> None:
    _compacted, memory = await compact(CountingBackend(WINDOW, says=None), make_turn(LONG), summary_timeout=0.01)
    assert memory.summary.startswith("(No summary could be written.")


async def test_cancelled_compaction_stops_at_once() -> None:
    working = asyncio.ensure_future(compact(CountingBackend(WINDOW, says=None), make_turn(LONG)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(working, 0.05)


async def test_too_long_summary_is_clipped() -> None:
    turn = make_turn(LONG)
    backend = CountingBackend(WINDOW, says="bla " * 5_000)
    compacted, memory = await compact(backend, turn)
    assert 0 < len(memory.summary) < 2_500
    assert await backend.count_tokens(with_items(turn, [*LONG, compacted.item])) < WINDOW


async def test_earlier_summary_is_summarised_and_not_retained() -> None:
    backend = CountingBackend(WINDOW)
    turn = make_turn(LONG)
    first, _ = await compact(backend, turn)
    more = [item for number in range(40, 80) for item in (call(str(number)), output(str(number), "steel " * 30))]
    whole = [*LONG, first.item, *more, user("ready?")]
    second, memory = await compact(backend, make_turn(lay_out(whole)))
    assert SUMMARY in extract_text(backend.read[1].items[0].content)  # type: ignore[union-attr]
    assert memory.first[0] == user("build a bridge")
    assert make_summary_message(SUMMARY) not in [*memory.first, *memory.last]
    # The second compaction covers everything that a client may send with it.
    read = with_items(turn, [second.item]).items
    for sent in ([*whole, second.item], [*LONG, *more, user("ready?"), second.item], [first.item, second.item]):
        assert [item for item in with_items(turn, sent).items if item != RULE] == read


async def test_earlier_summary_stays_if_nothing_was_added() -> None:
    backend = CountingBackend(WINDOW)
    turn = make_turn(LONG)
    first, memory = await compact(backend, turn)
    _, again = await compact(backend, make_turn(lay_out([RULE, first.item])))
    assert (again.summary, len(backend.read)) == (memory.summary, 1)


async def test_threshold_limits_the_retained_items() -> None:
    backend = CountingBackend(100_000)
    counted = []
    for threshold in (300, 3_000):
        turn = make_turn(LONG, context_management=[ContextManagement("compaction", threshold)])
        compacted, _ = await compact(backend, turn)
        counted.append(await backend.count_tokens(with_items(turn, [*LONG, compacted.item])))
    assert counted[0] <= 300 < counted[1] <= 3_000


async def test_instructions_that_fill_the_window_are_refused() -> None:
    turn = make_turn([Message("system", "Be kind. " * 2_000), user("hi")])
    with pytest.raises(ContextLengthExceeded, match=r"context length is 2000 tokens\. System and .* take 60"):
        await compact(CountingBackend(WINDOW), turn)


CLICK = ComputerCall("s", [], "cu", "completed", actions=[{"type": "screenshot"}])
SCREENSHOT = ComputerCallOutput("s", ComputerScreenshot(image_url="data:," + "x" * 150 * WINDOW))
HOSTILE: dict[str, list[Item | Unknown]] = {
    "an output of fifty windows": [user("task"), call("c"), output("c", "steel " * 50 * WINDOW)],
    "arguments of fifty windows": [user("task"), call("c", f'{{"a":"{"x" * 150 * WINDOW}"}}'), output("c", "ok")],
    "ten thousand tiny turns": [
        item for number in range(10_000) for item in (user(f"q{number}"), assistant(f"a{number}"))
    ],
    "a giant task": [user("bridge " * 20 * WINDOW), assistant("ok"), user("go on")],
    "a giant question": [user("task"), assistant("ok"), user("why " * 20 * WINDOW)],
    "a giant answer": [user("task"), assistant("so " * 20 * WINDOW)],
    "a giant thought": [user("task"), Reasoning(id="rs_1", encrypted_content="x" * 50 * WINDOW), assistant("ok")],
    "a thousand calls at once": [
        user("task"),
        *(call(str(number)) for number in range(1_000)),
        *(output(str(number), "x" * 100) for number in range(1_000)),
    ],
    "a screenshot of fifty windows beside outputs": [
        user("task"),
        *(call("a"), CLICK, call("b"), output("a", "x" * 5_000), SCREENSHOT, output("b", "x" * 40)),
        user("look " * 1_000),
    ],
    "messages without end after an output": [
        *(user("task"), call("c"), output("c", "x" * 5_000)),
        *(user("and " * number) for number in range(500)),
    ],
    "a giant thing unknown": [user("task"), Unknown(b'{"type":"acme:x","a":"' + b"x" * 50 * WINDOW + b'"}')],
    "signs instead of words": [user("\x00\u2028\U0001f600" * 5_000), assistant("好" * 5_000), user("好" * 5_000)],
}


@pytest.mark.parametrize("per_token", [1, 3, 6])
@pytest.mark.parametrize("name", HOSTILE)
async def test_any_conversation_fits_after_compaction(name: str, per_token: int) -> None:
    await check_fit(CountingBackend(WINDOW, per_token=per_token, says="word " * 400), HOSTILE[name])


async def check_fit(backend: CountingBackend, items: list[Item | Unknown]) -> None:
    turn = make_turn([RULE, *items])
    compacted, memory = await compact(backend, turn)
    # A continuation by chain, by retained messages, or by the item alone, with a new question.
    question = user("x" * (WINDOW // 16))
    for sent in ([RULE, *items, compacted.item], [*compacted.retained, compacted.item], [compacted.item]):
        going_on = with_items(turn, [*sent, question])
        assert await backend.count_tokens(going_on) <= WINDOW * 7 // 8
        await backend.stream(going_on)
    calls = {item.call_id for item in memory.list_items() if item.type == "function_call"}  # type: ignore[union-attr]
    outputs = {item.call_id for item in memory.list_items() if item.type == "function_call_output"}  # type: ignore[union-attr]
    assert calls == outputs


sizes = st.sampled_from([0, 1, 20, 300, 5_000, 60_000])
steps = st.one_of(
    sizes.map(lambda size: [user("u" * size)]),
    sizes.map(lambda size: [assistant("a " * size)]),
    st.tuples(sizes, sizes).map(lambda pair: [call("c", '"' * pair[0]), output("c", "o\n" * pair[1])]),
    sizes.map(lambda size: [Reasoning(id="rs", encrypted_content="r" * size), assistant("so")]),
    sizes.map(lambda size: [CLICK, call("c"), output("c", "o" * size), SCREENSHOT, user("u" * size)]),
    sizes.map(lambda size: [call("p"), call("q"), output("q", "o" * size), output("p", "o")]),
)


@given(st.lists(steps, min_size=1, max_size=15), st.integers(1, 6), st.sampled_from(["", "s" * 30_000, SUMMARY]))
async def test_compaction_always_fits_the_window(drawn: list[list[Item | Unknown]], per_token: int, says: str) -> None:
    backend = CountingBackend(WINDOW, per_token=per_token, says=says)
    await check_fit(backend, [item for step in drawn for item in step])


async def test_huge_history_is_compacted_in_bounded_memory() -> None:
    items: list[Item | Unknown] = [user("task"), call("c"), output("c", "x" * 10**7)]
    turn = make_turn(items)
    tracemalloc.start()
    await compact(CountingBackend(WINDOW), turn)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**8


async def test_unknown_window_uses_the_assumed_size() -> None:
    items: list[Item | Unknown] = [user("task"), *(assistant("word " * 2_000) for _ in range(200)), user("next")]
    backend = CountingBackend(None)
    turn = make_turn(items)
    compacted, _ = await compact(backend, turn)
    assert await backend.count_tokens(with_items(turn, [*items, compacted.item])) < 64_000
