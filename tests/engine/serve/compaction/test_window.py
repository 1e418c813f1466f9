"""Windows that nobody knows: a model that refuses what it was thought to have room for is asked for less."""

from typing import Any

import pytest

from antiphon.engine.serve.compaction.compactor import Compactor
from antiphon.engine.serve.compaction.window import ASSUMED_WINDOW, ContextWindow, measure_window, shrink_window
from antiphon.errors import ContextLengthExceeded, RateLimited
from antiphon.protocol.items import Compaction, Item, Message
from antiphon.protocol.request import ContextManagement
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import CloseItem, Delta, Finish, OpenItem, Text, TokenUsage
from support.compaction import (
    SEALER,
    SUMMARY,
    CountingBackend,
    assistant,
    call,
    compact,
    make_turn,
    output,
    user,
    with_items,
)

WINDOW = 4_000
LONG: list[Item | Unknown] = [
    user("build a bridge"),
    *(item for number in range(200) for item in (call(str(number)), output(str(number), "steel " * 300))),
]
# One step, so there is nothing to summarise: the answer is the first to be refused.
HUGE: list[Item | Unknown] = [user("read it"), call("c"), output("c", "steel " * 20_000)]
THRESHOLD = {"context_management": [ContextManagement("compaction", 500)]}


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens.", 4096),
        ("The decoder prompt (length 5000) is longer than the maximum model length of 4096.", 4096),
        ("request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it", 4096),
        ("The input (5000 tokens) is longer than the model's context length (4096 tokens).", 4096),
        ("The input token count (5000) exceeds the maximum number of tokens allowed (4096).", 4096),
        ("prompt is too long: 110000 tokens > 100,000 maximum", 100_000),
        ("Prompt contains 5000 tokens, too large for model with 4096 maximum context length", 4096),
        ("`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens", 4096),
        ("Your input exceeds the context window of this model.", 64_000),
        ("The context window is 200000 tokens.", 64_000),
        ("The limit of 100 requests is reached.", 64_000),
    ],
)
async def test_the_size_that_a_refusal_tells_is_believed_if_it_explains_it_and_else_it_is_half(
    words: str, size: int
) -> None:
    turn, route = make_turn([]), CountingBackend(None).route
    window = await measure_window(route, turn)
    assert (window.size, window.is_guess) == (ASSUMED_WINDOW, True)
    smaller = await shrink_window(route, turn, window, ContextLengthExceeded(words))
    assert smaller is not None
    assert (smaller.size, smaller.is_guess) == (size, True)


async def test_what_the_rules_take_cannot_be_shrunk() -> None:
    turn, route = make_turn([Message("system", "word " * 1_000)]), CountingBackend(None).route
    window = ContextWindow(2_500, 1_700, 600, 300)
    assert await shrink_window(route, turn, window, ContextLengthExceeded("too long")) is None


@pytest.mark.parametrize("words", ["The maximum context length is 4000 tokens.", "Too long."])
async def test_a_compaction_fits_though_its_summary_was_refused_at_first(words: str) -> None:
    backend = CountingBackend(WINDOW, refuses=words)
    turn = make_turn(LONG)
    compacted, memory = await compact(backend, turn)
    assert (memory.summary, compacted.window.size) == (SUMMARY, 4_000)
    assert backend.refused == (1 if "4000" in words else 5)
    assert await backend.count_tokens(with_items(turn, [*LONG, compacted.item])) < WINDOW


async def test_a_model_that_refuses_everything_is_not_asked_for_ever() -> None:
    backend = CountingBackend(0, refuses="Too long.")
    compacted, memory = await compact(backend, make_turn(LONG))
    assert memory.summary.startswith("(No summary could be written.")
    assert (backend.refused, compacted.window.size) == (8, ASSUMED_WINDOW // 2**8)


async def speak(backend: CountingBackend, items: list[Item | Unknown]) -> list[Delta]:
    begun = await Compactor(SEALER).start(backend.route, make_turn(items, **THRESHOLD))
    assert begun is not None
    return [delta async for batch in begun for delta in batch]


async def test_an_answer_that_is_refused_has_its_turn_compacted_anew() -> None:
    backend = CountingBackend(WINDOW, refuses="The maximum context length is 4000 tokens.")
    told = await speak(backend, HUGE)
    kinds = [type(delta) for delta in told]
    assert (kinds.count(OpenItem), kinds.count(CloseItem)) == (1, 1)
    assert told[-3] == Text(SUMMARY)
    assert (type(told[-2]), told[-1], backend.refused) == (TokenUsage, Finish(), 1)
    (closed,) = (delta.item for delta in told if isinstance(delta, CloseItem))
    assert isinstance(closed, Compaction)
    assert await backend.count_tokens(with_items(make_turn(HUGE), [*HUGE, closed])) < WINDOW


@pytest.mark.parametrize(
    ("backend", "asked"),
    [
        (CountingBackend(0, refuses="Too long."), 9),
        (CountingBackend(None, says=RateLimited("Slow down.")), 1),
        (CountingBackend(None, says=RuntimeError("boom")), 1),
    ],
    ids=["refuses everything", "is busy", "is broken"],
)
async def test_what_fails_after_all_fails_with_the_compaction_shown(backend: CountingBackend, asked: int) -> None:
    begun = await Compactor(SEALER).start(backend.route, make_turn(HUGE, **THRESHOLD))
    assert begun is not None
    told: list[Any] = []
    with pytest.raises((ContextLengthExceeded, RateLimited, RuntimeError)):
        async for batch in begun:
            told += batch
    assert isinstance(told[-1], CloseItem)
    assert backend.refused + len(backend.read) == asked


async def test_whoever_leaves_when_the_answer_has_begun_leaves_it_closed() -> None:
    backend = CountingBackend(None)
    begun = await Compactor(SEALER).start(backend.route, make_turn([*HUGE, assistant("so"), user("go")], **THRESHOLD))
    assert begun is not None
    batches = [await anext(begun), await anext(begun)]
    assert isinstance(batches[1][0], CloseItem)
    await begun.aclose()
    assert backend.open == 0
