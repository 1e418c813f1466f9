"""Compaction: a conversation that has become too long goes on from a summary, the task and its last steps."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

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
    ends_in_trigger,
    expand_compactions,
    is_marker,
    is_never_compacted,
)
from antiphon.engine.serve.compaction.selection import SelectedItems, SizeLimits, select_items
from antiphon.engine.serve.compaction.summary import CHARACTERS_PER_TOKEN, Summariser, Summary
from antiphon.engine.serve.compaction.window import (
    ContextWindow,
    count_conversation,
    exceeds_threshold,
    measure_window,
    shrink_window,
)
from antiphon.engine.serve.routing import Route, Serving
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol import codec, events
from antiphon.protocol.items import Compaction, Item, Message
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta, Deltas

logger = logging.getLogger(__name__)

SUMMARY_SECONDS = 120.0
# In tokens. A longer summary is none, and more of the last steps is of no use, however large the window is.
_LONGEST_SUMMARY = 2048
_MOST_KEPT = 16_000
# A window that nobody knows can be taken for half of what it was so often.
_MOST_SHRINKS = 8

# How a compaction is told, as an item that has a life of its own.
_KEY = "compaction"
_OPENING: Sequence[Delta] = (
    deltas.OpenItem(_KEY, Compaction(""), "cmp"),
    deltas.ItemEvent(Unknown(codec.encode(events.CompactionCompacting(0, "", 0))), _KEY),
)


class CompactedTurn(msgspec.Struct, frozen=True):
    """The item, the messages that a client should keep before it, what it took, and who has written the summary.

    `window` is what it has room in.
    """

    item: Compaction
    retained: list[Item | Unknown]
    usage: Usage
    served: deltas.Served | None
    window: ContextWindow


class Compactor:
    """Compacts turns. `patience` is how many seconds a model has for a summary."""

    def __init__(self, sealer: Sealer, *, patience: float = SUMMARY_SECONDS) -> None:
        self._sealer = sealer
        self._summariser = Summariser(patience=patience)

    async def compact(self, route: Route, turn: Turn) -> CompactedTurn:
        """Compact the turn's whole context. Raises ContextLengthExceeded if what cannot be compacted leaves no room."""
        return await self._compact(route, turn, await measure_window(route, turn))

    async def start(self, route: Route, turn: Turn, *, replayed: Sequence[Delta] = ()) -> Deltas | None:
        """Begin a turn that is to be compacted first; None if it is not.

        `replayed` is what an earlier attempt at it has said. A compaction that was shown stays, and is not made again.
        """
        begun = [delta.item for delta in replayed[:1] if isinstance(delta, deltas.OpenItem)]
        if replayed:
            wanted = any(isinstance(item, Compaction) for item in begun)
        else:
            wanted = ends_in_trigger(turn.items) or await self._is_due(route, turn)
        if not wanted:
            return None
        window = await measure_window(route, turn)
        shown = next((delta.item for delta in replayed if isinstance(delta, deltas.CloseItem)), None)
        return self._speak(route, turn, window, shown if isinstance(shown, Compaction) else None)

    async def _is_due(self, route: Route, turn: Turn) -> bool:
        if not turn.request.context_management:
            return False
        found = find_last_compaction(turn.items, self._sealer, project=turn.project)
        return await exceeds_threshold(route, turn, found[1].unfold() if found is not None else None)

    async def _speak(
        self, route: Route, turn: Turn, window: ContextWindow, shown: Compaction | None
    ) -> AsyncGenerator[Sequence[Delta], None]:
        yield _OPENING
        if shown is None:
            compacted = await self._compact(route, turn, window)
        else:
            compacted = CompactedTurn(shown, [], Usage(0, 0, 0), None, window)
        if ends_in_trigger(turn.items):
            yield [deltas.CloseItem(_KEY, compacted.item)]
            served = [compacted.served] if compacted.served is not None else []
            yield [*served, deltas.TokenUsage(compacted.usage), deltas.Finish()]
            return
        begun: Serving | Exception | None = None
        if compacted.window.is_guess and shown is None:  # once it is shown, it cannot become smaller any more
            compacted, begun = await self._try(route, turn, compacted)
        closed: list[Delta] = [deltas.CloseItem(_KEY, compacted.item)]
        if not isinstance(begun, Serving):
            yield closed
            closed = []
        if isinstance(begun, Exception):
            raise begun
        serving = begun or await self._go_on(route, turn, compacted)
        async with aclosing(serving.deltas) as answer:
            served = [serving.served] if serving.served is not None else []
            yield [*closed, *served, deltas.TokenUsage(compacted.usage)]
            async for batch in answer:
                yield [_add_usage(delta, compacted.usage) for delta in batch]

    async def _go_on(self, route: Route, turn: Turn, compacted: CompactedTurn) -> Serving:
        """The answer to what is left of the turn."""
        expanded = expand_compactions([*turn.items, compacted.item], self._sealer, project=turn.project)
        return await route.start(msgspec.structs.replace(turn, items=expanded.items))

    async def _try(
        self, route: Route, turn: Turn, compacted: CompactedTurn
    ) -> tuple[CompactedTurn, Serving | Exception]:
        """Begin the answer; compact anew, for an ever smaller window, until the model takes it or that is of no use."""
        left = _MOST_SHRINKS
        while True:
            try:
                return compacted, await self._go_on(route, turn, compacted)
            except ContextLengthExceeded as refusal:
                smaller = await shrink_window(route, turn, compacted.window, refusal) if left else None
                if smaller is None:
                    return compacted, refusal
            except Exception as error:
                return compacted, error
            left -= 1
            again = await self._compact(route, turn, smaller)
            compacted = msgspec.structs.replace(again, usage=again.usage + compacted.usage)

    async def _compact(self, route: Route, turn: Turn, window: ContextWindow) -> CompactedTurn:
        """Compact for this window, or for the smaller one that the model turns out to have."""
        for _ in range(_MOST_SHRINKS):
            try:
                return await self._compact_for(window, route, turn)
            except ContextLengthExceeded as refusal:
                smaller = await shrink_window(route, turn, window, refusal)
            if smaller is None:
                break
            logger.warning(
                "a turn of %d tokens is too long for the model: taking them for %d", window.size, smaller.size
            )
            window = smaller
        return await self._compact_for(window, route, turn, ask=False)

    async def _compact_for(self, window: ContextWindow, route: Route, turn: Turn, *, ask: bool = True) -> CompactedTurn:
        """Raises ContextLengthExceeded if the model cannot read so much; unless it is not asked."""
        found = find_last_compaction(turn.items, self._sealer, project=turn.project)
        earlier = found[1] if found is not None else CompactionContent(summary="", first=[], last=[], covered=b"")
        told = [make_summary_message(earlier.summary)] if earlier.summary else []
        items = [
            item for item in turn.items if not is_never_compacted(item) and not is_marker(item) and item not in told
        ]
        tokens = max(1, min(window.goal // 8, _LONGEST_SUMMARY))
        chosen = await _choose(route, turn, items, window, limit=window.limit - tokens)
        summary = Summary(earlier.summary, Usage(0, 0, 0), None)
        if chosen.rest:
            material = [*told, *chosen.rest]
            if ask:
                summary = await self._summariser.summarise(route, turn, material, window=window.size, tokens=tokens)
            else:
                summary = self._summariser.extract(material, tokens=tokens)
        marks = join_fingerprints([*earlier.marks(), *map(fingerprint_item, told), *map(fingerprint_item, items)])
        memory = CompactionContent(summary="", first=chosen.first, last=chosen.last, covered=marks)
        await _fit(route, turn, memory, clip_text(summary.text, 2 * tokens * CHARACTERS_PER_TOKEN), limit=window.limit)
        item = seal_content(memory, self._sealer, project=turn.project)
        return CompactedTurn(item, _retain(turn, chosen), summary.usage, summary.served, window)


async def _choose(
    route: Route, turn: Turn, items: list[Item | Unknown], window: ContextWindow, *, limit: int
) -> SelectedItems:
    """What stays of the items, so that it fits. How many tokens a text takes is known only when it is counted."""
    hard = window.room * CHARACTERS_PER_TOKEN
    soft = min(window.goal, 4 * _MOST_KEPT) * CHARACTERS_PER_TOKEN
    while hard > 1:
        chosen = select_items(items, SizeLimits(hard, soft))
        counted = await count_conversation(route, turn, [*chosen.first, *chosen.last])
        if counted <= limit:
            return chosen
        share = _share(limit - window.rules, counted - window.rules)
        hard, soft = int(hard * share), int(soft * share)
    return SelectedItems([], [], items)


async def _fit(route: Route, turn: Turn, memory: CompactionContent, summary: str, *, limit: int) -> None:
    """Put the summary in, or as much of it as has room."""
    memory.summary = summary
    while memory.summary:
        counted = await count_conversation(route, turn, memory.unfold())
        if counted <= limit:
            return
        memory.summary = clip_text(memory.summary, int(len(memory.summary) * _share(limit, counted)))


def _share(wanted: int, counted: int) -> float:
    """By how much to shrink what counts so many tokens. Not all of it shrinks, so a bit more than that."""
    return max(0.05, min(0.7, 0.9 * wanted / counted)) if counted > 0 else 0.5


def _retain(turn: Turn, chosen: SelectedItems) -> list[Item | Unknown]:
    asked = [item for item in (*chosen.first, *chosen.last) if isinstance(item, Message) and item.role == "user"]
    return [*(item for item in turn.items if is_never_compacted(item)), *asked[:1]]


def _add_usage(delta: Delta, spent: Usage) -> Delta:
    """The answer's usage together with what the summary took."""
    return deltas.TokenUsage(delta.usage + spent) if isinstance(delta, deltas.TokenUsage) else delta
