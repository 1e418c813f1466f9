"""Context windows of unknown size, and models that refuse a turn's length."""

from typing import Any

import pytest

from antiphon.engine.serve.compaction.compactor import Compactor
from antiphon.engine.serve.compaction.window import ASSUMED_WINDOW, ContextWindow, ContextWindows
from antiphon.errors import ContextLengthExceeded, RateLimited
from antiphon.protocol.items import Compaction, CompactionTrigger, Item, Message
from antiphon.protocol.request import ContextManagement
from antiphon.protocol.response import Usage
from antiphon.protocol.tools import FunctionTool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import CloseItem, Delta, Failure, Finish, OpenItem, Text, TokenUsage
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
        ("input length and `max_tokens` exceed context limit: 1000 + 99500 > 100000, decrease them", 100_000),
        ("max_tokens is too large: 9999. The window has 4096 tokens (9999 > 4096 - 20).", 4096),
        ("too many tokens: size limit exceeded by 5000 tokens", 64_000),
        ("Your input exceeds the context window of this model.", 64_000),
        ("The context window is 200000 tokens.", 64_000),
        ("The limit of 100 requests is reached.", 64_000),
    ],
)
async def test_refused_window_shrinks_to_the_reported_size_or_half(words: str, size: int) -> None:
    turn, route = make_turn([]), CountingBackend(None).route
    windows = ContextWindows()
    window = await windows.measure(route, turn)
    assert (window.size, window.is_guess) == (ASSUMED_WINDOW, True)
    smaller = await windows.shrink(route, turn, window, ContextLengthExceeded(words))
    assert smaller is not None
    assert (smaller.size, smaller.is_guess) == (size, True)
    # Half of the size is remembered when the model has accepted a turn for it.
    assert await windows.measure(route, turn) == (window if size == ASSUMED_WINDOW // 2 else smaller)
    windows.learn_shrunk(route, smaller)
    assert await windows.measure(route, turn) == smaller


async def test_window_cannot_shrink_below_the_instructions() -> None:
    turn, route = make_turn([Message("system", "word " * 1_000)]), CountingBackend(None).route
    window = ContextWindow(2_500, 1_700, 600, 300)
    assert await ContextWindows().shrink(route, turn, window, ContextLengthExceeded("too long")) is None


@pytest.mark.parametrize("words", ["The maximum context length is 4000 tokens.", "Too long."])
async def test_compaction_fits_after_a_refused_summary_request(words: str) -> None:
    backend = CountingBackend(WINDOW, refuses=words)
    turn = make_turn(LONG)
    compacted, memory = await compact(backend, turn)
    assert (memory.summary, compacted.window.size) == (SUMMARY, 4_000)
    assert backend.refused == (1 if "4000" in words else 5)
    assert await backend.count_tokens(with_items(turn, [*LONG, compacted.item])) < WINDOW


async def test_model_that_refuses_everything_ends_the_retries() -> None:
    backend = CountingBackend(0, refuses="Too long.")
    with pytest.raises(ContextLengthExceeded, match="Too long"):
        await compact(backend, make_turn(LONG))
    assert backend.refused < 20


@pytest.mark.parametrize("words", ["The maximum context length is 1500 tokens.", "Too long."])
@pytest.mark.parametrize("trigger", [False, True])
async def test_explicit_compaction_fits_a_window_of_unknown_size(words: str, *, trigger: bool) -> None:
    backend = CountingBackend(1500, refuses=words)
    compactor = Compactor(SEALER)
    if trigger:
        begun = await compactor.start(backend.route, make_turn([*HUGE, CompactionTrigger()]))
        assert begun is not None
        (item,) = [each.item async for batch in begun for each in batch if isinstance(each, CloseItem)]
    else:
        item = (await compactor.compact(backend.route, make_turn(HUGE))).item
    assert isinstance(item, Compaction)
    assert await backend.count_tokens(with_items(make_turn(HUGE), [*HUGE, item])) < 1500


async def test_usage_has_the_call_that_checks_the_length() -> None:
    backend = CountingBackend(None)
    compactor = Compactor(SEALER)
    items: list[Item | Unknown] = [user("build a bridge"), assistant("done"), user("and now?")]
    first = await compactor.compact(backend.route, make_turn(items))
    assert (first.usage, len(backend.read)) == (Usage(10, 5, 15), 1)
    # The model is known to accept this length.
    second = await compactor.compact(backend.route, make_turn(items))
    assert (second.usage, len(backend.read)) == (Usage(0, 0, 0), 1)


async def test_failure_of_the_check_leaves_the_compaction_as_it_is() -> None:
    backend = CountingBackend(None, says=RateLimited("Slow down."))
    compacted, memory = await compact(backend, make_turn([user("build a bridge")]))
    assert (memory.list_items(), compacted.usage) == ([user("build a bridge")], Usage(0, 0, 0))


async def test_refusal_of_an_ordinary_turn_is_remembered_for_its_model() -> None:
    backend = CountingBackend(WINDOW, refuses="The maximum context length is 4000 tokens.")
    compactor = Compactor(SEALER)
    compactor.learn_refusal(backend.route, ContextLengthExceeded("The maximum context length is 4000 tokens."))
    compacted = await compactor.compact(backend.route, make_turn(LONG))
    assert (compacted.window.size, backend.refused) == (4_000, 0)


@pytest.mark.parametrize("trigger", [False, True])
async def test_request_that_is_always_refused_changes_no_other_request(*, trigger: bool) -> None:
    # The reason may be the request's own, such as too many tokens to write.
    compactor, turn = Compactor(SEALER), make_turn([*HUGE, *([CompactionTrigger()] if trigger else [])], **THRESHOLD)
    begun = await compactor.start(CountingBackend(0, refuses="Too long.").route, turn)
    assert begun is not None
    with pytest.raises(ContextLengthExceeded):
        async for _ in begun:
            pass
    compacted = await compactor.compact(CountingBackend(None).route, make_turn(LONG))
    assert compacted.window.size == ASSUMED_WINDOW


@pytest.mark.parametrize("items", [LONG, HUGE])
async def test_smaller_window_is_remembered_when_a_turn_was_accepted(items: list[Item | Unknown]) -> None:
    backend, compactor = CountingBackend(WINDOW, refuses="Too long."), Compactor(SEALER)
    first = await compactor.compact(backend.route, make_turn(items))
    refused = backend.refused
    second = await compactor.compact(backend.route, make_turn(items))
    assert first.window.size == second.window.size == ASSUMED_WINDOW // 2**refused
    assert backend.refused == refused > 0


async def test_failed_check_of_the_length_does_not_count_as_accepted() -> None:
    backend, compactor = CountingBackend(None, says=Failure("Too long.")), Compactor(SEALER)
    for calls in (1, 2):
        await compactor.compact(backend.route, make_turn([user("build a bridge")]))
        assert len(backend.read) == calls


@pytest.mark.parametrize("tools", [None, [FunctionTool("look")]])
async def test_check_of_the_length_calls_no_tools(tools: Any) -> None:
    backend = CountingBackend(None)
    await Compactor(SEALER).compact(backend.route, make_turn([user("build a bridge")], tools=tools))
    assert [turn.request.tool_choice for turn in backend.read] == ["none" if tools else None]


async def test_listed_window_is_not_replaced_by_a_refusal() -> None:
    backend = CountingBackend(WINDOW)
    windows = ContextWindows()
    windows.learn_refusal(backend.route, ContextLengthExceeded("The maximum context length is 1000 tokens."))
    assert (await windows.measure(backend.route, make_turn([]))).size == WINDOW


async def run_turn(backend: CountingBackend, items: list[Item | Unknown]) -> list[Delta]:
    begun = await Compactor(SEALER).start(backend.route, make_turn(items, **THRESHOLD))
    assert begun is not None
    return [delta async for batch in begun for delta in batch]


async def test_refused_answer_is_compacted_again() -> None:
    backend = CountingBackend(WINDOW, refuses="The maximum context length is 4000 tokens.")
    emitted = await run_turn(backend, HUGE)
    kinds = [type(delta) for delta in emitted]
    assert (kinds.count(OpenItem), kinds.count(CloseItem)) == (1, 1)
    assert emitted[-3] == Text(SUMMARY)
    assert (type(emitted[-2]), emitted[-1], backend.refused) == (TokenUsage, Finish(), 1)
    (closed,) = (delta.item for delta in emitted if isinstance(delta, CloseItem))
    assert isinstance(closed, Compaction)
    assert await backend.count_tokens(with_items(make_turn(HUGE), [*HUGE, closed])) < WINDOW


@pytest.mark.parametrize(
    ("backend", "requests"),
    [
        (CountingBackend(0, refuses="Too long."), 9),
        (CountingBackend(None, says=RateLimited("Slow down.")), 1),
        (CountingBackend(None, says=RuntimeError("boom")), 1),
    ],
    ids=["refuses everything", "is busy", "is broken"],
)
async def test_final_refusal_fails_after_the_compaction_is_emitted(backend: CountingBackend, requests: int) -> None:
    begun = await Compactor(SEALER).start(backend.route, make_turn(HUGE, **THRESHOLD))
    assert begun is not None
    emitted: list[Any] = []
    with pytest.raises((ContextLengthExceeded, RateLimited, RuntimeError)):
        async for batch in begun:
            emitted += batch
    assert [type(delta) for delta in emitted[-2:]] == [CloseItem, TokenUsage]
    assert backend.refused + len(backend.read) == requests


async def test_closing_after_the_start_closes_the_answer() -> None:
    backend = CountingBackend(None)
    begun = await Compactor(SEALER).start(backend.route, make_turn([*HUGE, assistant("so"), user("go")], **THRESHOLD))
    assert begun is not None
    batches = [await anext(begun), await anext(begun)]
    assert isinstance(batches[1][0], CloseItem)
    await begun.aclose()
    assert backend.open == 0
