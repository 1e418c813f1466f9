"""Compaction of a turn: replace a conversation that is too long by a summary, the task and the last steps."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec

from antiphon import offload
from antiphon.backends.base import Turn
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.clipping import clip_text
from antiphon.engine.serve.compaction.compaction_item import (
    CompactionContent,
    find_last_compaction,
    fingerprint_item,
    join_fingerprints,
    make_summary_message,
    seal_content,
)
from antiphon.engine.serve.compaction.expansion import (
    ExpandedItems,
    ends_in_trigger,
    expand_compactions,
    is_marker,
    is_never_compacted,
)
from antiphon.engine.serve.compaction.selection import SelectedItems, SizeLimits, is_question, select_items
from antiphon.engine.serve.compaction.summary import CHARACTERS_PER_TOKEN, Summariser, Summary
from antiphon.engine.serve.compaction.window import ContextWindow, ContextWindows, count_conversation
from antiphon.engine.serve.routing import ModelRoute, Serving
from antiphon.errors import ContextLengthExceeded, InvalidRequest, ModelError
from antiphon.protocol import codec, events
from antiphon.protocol.content import InputText
from antiphon.protocol.items import Compaction, Item, Message
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta, Deltas

logger = logging.getLogger(__name__)

SUMMARY_TIMEOUT = 120.0
# Maximum tokens of a summary and of retained items, for a window of any size.
_MAX_SUMMARY_TOKENS = 2048
_MAX_RETAINED_TOKENS = 16_000
# Maximum number of times that the assumed size of a window is reduced.
_MAX_SHRINKS = 8

# Output tokens of the trial that shows that a compacted conversation fits. Some servers refuse to write fewer.
_TRIAL_TOKENS = 16
_TRIAL_MESSAGE = Message("user", [InputText("Continue.")])

_KEY = "compaction"
_START_DELTAS: Sequence[Delta] = (
    deltas.OpenItem(_KEY, Compaction(""), "cmp"),
    deltas.ItemPassthrough(Unknown(codec.encode(events.CompactionCompacting(0, "", 0))), _KEY),
)


T = TypeVar("T")


class CompactedTurn(msgspec.Struct, frozen=True):
    """A compacted turn.

    `retained` are the messages that a client should send before the item. `usage` and `served` are the summary's.
    `window` is the context window that the compacted turn fits.
    """

    item: Compaction
    retained: list[Item | Unknown]
    usage: Usage
    served: deltas.Served | None
    window: ContextWindow


class Compactor:
    """Compacts turns. `summary_timeout` is the time limit for a summary, in seconds."""

    def __init__(self, sealer: Sealer, *, summary_timeout: float = SUMMARY_TIMEOUT) -> None:
        self._sealer = sealer
        self._summariser = Summariser(timeout=summary_timeout)
        self._windows = ContextWindows()

    def learn_refusal(self, route: ModelRoute, refusal: ContextLengthExceeded) -> None:
        """Remember the window size that the refusal of an ordinary turn states."""
        self._windows.learn_refusal(route, refusal)

    async def compact(self, route: ModelRoute, turn: Turn) -> CompactedTurn:
        """Compact the whole turn.

        Raises ContextLengthExceeded if instructions and tools fill the window, and InvalidRequest if there is nothing
        else in the turn.
        """
        window = await self._windows.measure(route, turn)
        if all(is_never_compacted(item) or is_marker(item) for item in turn.items):
            raise InvalidRequest(
                "There is nothing to compact: the conversation has no items besides instructions and tools.",
                param="input",
                code="invalid_value",
            )
        return await self._fit(route, turn, await self._compact(route, turn, window))

    def applies_to(self, turn: Turn) -> bool:
        """Return False if a turn that is started for the first time needs no compaction."""
        return bool(turn.request.context_management) or ends_in_trigger(turn.items)

    async def start(self, route: ModelRoute, turn: Turn, *, replayed: Sequence[Delta] = ()) -> Deltas | None:
        """Start a turn that has to be compacted first. Return None if the turn needs no compaction.

        `replayed` are the deltas of an earlier attempt at the turn. A compaction among them is used again.
        """
        started = [delta.item for delta in replayed[:1] if isinstance(delta, deltas.OpenItem)]
        if replayed:
            is_due = any(isinstance(item, Compaction) for item in started)
        else:
            is_due = ends_in_trigger(turn.items) or await self._exceeds_threshold(route, turn)
        if not is_due:
            return None
        window = await self._windows.measure(route, turn)
        emitted = next((delta.item for delta in replayed if isinstance(delta, deltas.CloseItem)), None)
        return self._stream(route, turn, window, emitted if isinstance(emitted, Compaction) else None)

    async def _exceeds_threshold(self, route: ModelRoute, turn: Turn) -> bool:
        if not turn.request.context_management:
            return False
        found = await self._find_last(turn)
        return await self._windows.exceeds_threshold(route, turn, found[1].list_items() if found is not None else None)

    async def _stream(
        self, route: ModelRoute, turn: Turn, window: ContextWindow, emitted: Compaction | None
    ) -> AsyncGenerator[Sequence[Delta], None]:
        yield _START_DELTAS
        if emitted is None:
            compacted = await self._compact(route, turn, window)
        else:
            compacted = CompactedTurn(emitted, [], Usage(0, 0, 0), None, window)
        if ends_in_trigger(turn.items):
            if emitted is None:
                compacted = await self._fit(route, turn, compacted)
            yield [deltas.CloseItem(_KEY, compacted.item)]
            served = [compacted.served] if compacted.served is not None else []
            yield [*served, deltas.TokenUsage(compacted.usage), deltas.Finish()]
            return
        started: Serving | Exception | None = None
        if compacted.window.is_guess and emitted is None:  # an emitted compaction cannot be changed
            compacted, started = await self._start_shrinking(route, turn, compacted, self._start_answer)
        served = [compacted.served] if compacted.served is not None else []
        counted = deltas.TokenUsage(compacted.usage, is_open=True)
        closed: list[Delta] = [deltas.CloseItem(_KEY, compacted.item), *served, counted]
        if not isinstance(started, Serving):
            turn.progress.is_sent = False
            yield closed
            closed = []
        if isinstance(started, Exception):
            raise started
        serving = started or await self._start_answer(route, turn, compacted)
        async with aclosing(serving.deltas) as answer:
            served = [serving.served] if serving.served is not None else []
            yield [*closed, *served]
            async for batch in answer:
                yield [_add_usage(delta, compacted.usage) for delta in batch]

    async def _start_answer(self, route: ModelRoute, turn: Turn, compacted: CompactedTurn) -> Serving:
        """Start the answer to the compacted turn."""
        expanded = await self._expand(turn, compacted)
        return await route.start(msgspec.structs.replace(turn, items=expanded.items))

    async def _find_last(self, turn: Turn) -> tuple[int, CompactionContent] | None:
        return await offload.run(partial(find_last_compaction, project=turn.project), turn.items, self._sealer)

    async def _expand(self, turn: Turn, compacted: CompactedTurn) -> ExpandedItems:
        items = [*turn.items, compacted.item]
        return await offload.run(partial(expand_compactions, project=turn.project), items, self._sealer)

    async def _fit(self, route: ModelRoute, turn: Turn, compacted: CompactedTurn) -> CompactedTurn:
        """Return a compaction that the model accepts, and add the usage of the calls that show it.

        This takes a call only if the window is not known, and the model has not accepted a turn of this length.
        Raises ContextLengthExceeded if the model refuses even the shortest turn. Other errors show nothing.
        """
        if not compacted.window.is_guess:
            return compacted
        compacted, tried = await self._start_shrinking(route, turn, compacted, self._try_length)
        if isinstance(tried, ContextLengthExceeded):
            raise tried
        if isinstance(tried, Exception):
            logger.warning("cannot check that the compacted conversation fits the model: %s", tried)
            return compacted
        return msgspec.structs.replace(compacted, usage=compacted.usage + tried)

    async def _try_length(self, route: ModelRoute, turn: Turn, compacted: CompactedTurn) -> Usage:
        """Send the compacted turn with a short question, unless the model has accepted a turn of this length."""
        expanded = await self._expand(turn, compacted)
        request = msgspec.structs.replace(
            turn.request,
            max_output_tokens=_TRIAL_TOKENS,
            # A backend for any tool executes some itself: a trial must not have effects.
            tool_choice="none" if turn.request.tools and route.first.backend.capabilities.any_tool else None,
            text=None,
            context_management=None,
        )
        trial = msgspec.structs.replace(turn, request=request, items=[*expanded.items, _TRIAL_MESSAGE])
        counted = await route.count_tokens(trial)
        if counted <= self._windows.find_learned(route).accepted:
            return Usage(0, 0, 0)
        usage = Usage(0, 0, 0)
        serving = await route.start(trial)
        async with aclosing(serving.deltas) as answer:
            async for batch in answer:
                for delta in batch:
                    if isinstance(delta, deltas.TokenUsage):
                        usage = delta.usage
                    elif isinstance(delta, deltas.Failure):
                        raise ModelError(delta.message, code=delta.code)
        self._windows.learn_accepted(route, counted)
        return usage

    async def _start_shrinking(
        self,
        route: ModelRoute,
        turn: Turn,
        compacted: CompactedTurn,
        start: Callable[[ModelRoute, Turn, CompactedTurn], Awaitable[T]],
    ) -> tuple[CompactedTurn, T | Exception]:
        """Start a call with the compacted turn. While the model refuses the length, compact again for a smaller window.

        Return the compaction that was sent last, and the started call or its error.
        """
        left = _MAX_SHRINKS
        while True:
            try:
                started = await start(route, turn, compacted)
                if left < _MAX_SHRINKS:
                    self._windows.learn_shrunk(route, compacted.window)
                return compacted, started
            except ContextLengthExceeded as refusal:
                smaller = await self._windows.shrink(route, turn, compacted.window, refusal) if left else None
                if smaller is None:
                    return compacted, refusal
            except Exception as error:
                return compacted, error
            left -= 1
            again = await self._compact(route, turn, smaller)
            compacted = msgspec.structs.replace(again, usage=again.usage + compacted.usage)

    async def _compact(self, route: ModelRoute, turn: Turn, window: ContextWindow) -> CompactedTurn:
        """Compact for this window, or for a smaller one if the model refuses its size."""
        measured = window
        for _ in range(_MAX_SHRINKS):
            try:
                compacted = await self._compact_for(window, route, turn)
                if window is not measured and compacted.served is not None:
                    self._windows.learn_shrunk(route, window)
                return compacted
            except ContextLengthExceeded as refusal:
                smaller = await self._windows.shrink(route, turn, window, refusal)
            if smaller is None:
                break
            logger.warning("the model refused a turn for a window of %d tokens: assuming %d", window.size, smaller.size)
            window = smaller
        return await self._compact_for(window, route, turn, use_model=False)

    async def _compact_for(
        self, window: ContextWindow, route: ModelRoute, turn: Turn, *, use_model: bool = True
    ) -> CompactedTurn:
        """Compact for this window. Without `use_model` the summary consists of extracts.

        Raises ContextLengthExceeded if the model refuses the window's size.
        """
        found = await self._find_last(turn)
        earlier = found[1] if found is not None else CompactionContent(summary="", first=[], last=[], covered=b"")
        summaries = [make_summary_message(earlier.summary)] if earlier.summary else []
        items = await offload.run(_list_compactable, turn.items, summaries)
        tokens = max(1, min(window.goal // 8, _MAX_SUMMARY_TOKENS))
        selected = await _select_fitting(route, turn, items, window, limit=window.limit - tokens)
        summary = Summary(earlier.summary, Usage(0, 0, 0), None)
        if selected.rest:
            material = [*summaries, *selected.rest]
            if use_model:
                summary = await self._summariser.summarise(route, turn, material, window=window.size, tokens=tokens)
                self._windows.learn_accepted(route, summary.accepted)
            else:
                summary = await offload.run(partial(self._summariser.extract, tokens=tokens), material)
        covered = await offload.run(_cover, earlier, [*summaries, *items])
        content = CompactionContent(summary="", first=selected.first, last=selected.last, covered=covered)
        await _set_summary(
            route, turn, content, clip_text(summary.text, 2 * tokens * CHARACTERS_PER_TOKEN), limit=window.limit
        )
        item = await offload.run(partial(seal_content, project=turn.project), content, self._sealer)
        return CompactedTurn(item, _list_retained(turn, selected), summary.usage, summary.served, window)


def _list_compactable(items: Sequence[Item | Unknown], summaries: Sequence[Item | Unknown]) -> list[Item | Unknown]:
    return [item for item in items if not is_never_compacted(item) and not is_marker(item) and item not in summaries]


def _cover(earlier: CompactionContent, items: Sequence[Item | Unknown]) -> bytes:
    """Return the fingerprints of the items that the earlier compaction and this one cover."""
    return join_fingerprints([*earlier.list_fingerprints(), *map(fingerprint_item, items)])


async def _select_fitting(
    route: ModelRoute, turn: Turn, items: list[Item | Unknown], window: ContextWindow, *, limit: int
) -> SelectedItems:
    """Select the items to retain, and reduce the size limits until their token count fits `limit`."""
    hard = window.room * CHARACTERS_PER_TOKEN
    soft = min(window.goal, 4 * _MAX_RETAINED_TOKENS) * CHARACTERS_PER_TOKEN
    while hard > 1:
        selected = await offload.run(select_items, items, SizeLimits(hard, soft))
        counted = await count_conversation(route, turn, [*selected.first, *selected.last])
        if counted <= limit:
            return selected
        factor = _shrink_factor(limit - window.fixed, counted - window.fixed)
        hard, soft = int(hard * factor), int(soft * factor)
    return SelectedItems([], [], items)


async def _set_summary(route: ModelRoute, turn: Turn, content: CompactionContent, summary: str, *, limit: int) -> None:
    """Set the summary, clipped until the content fits `limit`."""
    content.summary = summary
    while content.summary:
        counted = await count_conversation(route, turn, content.list_items())
        if counted <= limit:
            return
        content.summary = clip_text(content.summary, int(len(content.summary) * _shrink_factor(limit, counted)))


def _shrink_factor(wanted: int, counted: int) -> float:
    """Return the factor for the next try. It is smaller than the ratio, because not all of the content shrinks."""
    return max(0.05, min(0.7, 0.9 * wanted / counted)) if counted > 0 else 0.5


def _list_retained(turn: Turn, selected: SelectedItems) -> list[Item | Unknown]:
    """Return the messages to show before the compaction, as OpenAI does. Its content covers those of the user.

    No two have the same id, so that a client can send all of them.
    """
    shown = [*filter(is_never_compacted, turn.items), *filter(is_question, (*selected.first, *selected.last))]
    ids: set[str | None] = set()
    for index, item in enumerate(shown):
        if item.id in ids and isinstance(item, Message):
            shown[index] = msgspec.structs.replace(item, id=None)
        ids.add(item.id)
    return shown


def _add_usage(delta: Delta, spent: Usage) -> Delta:
    """Add the summary's usage to the answer's."""
    return deltas.TokenUsage(delta.usage + spent, delta.is_open) if isinstance(delta, deltas.TokenUsage) else delta
