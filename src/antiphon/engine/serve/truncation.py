"""`truncation: auto`: drop the oldest exchanges with the user, then the oldest tool steps, until the rest fits.

System and developer messages, tools, the last user message and the last step are never dropped. A call and its output
are dropped together or not at all.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from antiphon.backends.base import Turn
from antiphon.engine.items import CALL_TYPES, OUTPUT_TYPES
from antiphon.engine.serve.stage import Stage
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol.hosted import AdditionalTools
from antiphon.protocol.items import Item, Message
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Deltas


class Truncation(Stage):
    """Shortens a context that is too long for the model, if the request allows it."""

    def stream(self, turn: Turn) -> Awaitable[Deltas]:
        """Begin the model call. If its context is too long, drop as many of the oldest exchanges as necessary.

        A shortened context gets a warning with the number of dropped items.
        """
        return self._stream_shortened(turn) if turn.request.truncation == "auto" else self.inner.stream(turn)

    async def _stream_shortened(self, turn: Turn) -> Deltas:
        try:
            return await self.inner.stream(turn)
        except ContextLengthExceeded:
            blocks = find_droppable(turn.items)
            if not blocks:
                raise
        dropped, step = await self._count_blocks_to_drop(turn, blocks), 1
        while dropped < len(blocks):
            try:
                return await self._stream_without(blocks[:dropped], turn)
            except ContextLengthExceeded:
                # The count was wrong, or there was none. Every attempt may be an upstream request, so the step grows.
                dropped, step = dropped + step, 2 * step
        return await self._stream_without(blocks, turn)

    async def count_tokens(self, turn: Turn) -> int:
        """Count the tokens of the turn, shortened as `stream` shortens it."""
        counted = await self.inner.count_tokens(turn)
        window = self._find_window(turn)
        if turn.request.truncation != "auto" or window is None or counted < window:
            return counted
        blocks = find_droppable(turn.items)
        return await self.inner.count_tokens(_shorten(turn, blocks[: await self._count_blocks_to_drop(turn, blocks)]))

    async def _stream_without(self, blocks: Sequence[Sequence[int]], turn: Turn) -> Deltas:
        shorter = _shorten(turn, blocks)
        answer = await self.inner.stream(shorter)
        dropped = len(turn.items) - len(shorter.items)
        turn.warnings.insert(0, f"truncation: the {dropped} oldest items were left out")
        return answer

    async def _count_blocks_to_drop(self, turn: Turn, blocks: Sequence[Sequence[int]]) -> int:
        """Return the smallest number of blocks to drop, by the token count alone."""
        window = self._find_window(turn)
        if window is None:
            return 1
        # Many clients request more output than a small model can give. At most a quarter of the window is reserved.
        limit = window - min(turn.request.max_output_tokens or 1, window // 4)
        low, high = 1, max(1, len(blocks))
        while low < high:
            middle = (low + high) // 2
            if await self.inner.count_tokens(_shorten(turn, blocks[:middle])) <= limit:
                high = middle
            else:
                low = middle + 1
        return low

    def _find_window(self, turn: Turn) -> int | None:
        unlisted = self.capabilities.context_window
        models = self.inner.models()
        return next((model.context_window for model in models if model.id == turn.request.model), unlisted)


def find_droppable(items: Sequence[Item | Unknown]) -> list[list[int]]:
    """Return the indexes of the items that can be dropped, in blocks, in the order of dropping.

    First come all exchanges but the last, oldest first: one begins with a user message. Then come the steps of the last
    exchange but its last step: a step is the model's output and the outputs of its calls. So the user's last question
    stays, and so do the newest results of a long tool loop. System messages and tools always stay.
    """
    exchanges = _group(items, range(len(items)), lambda item, _: _is_from(item, "user"))
    if not exchanges:
        return []
    rest = [index for index in exchanges[-1] if not _is_from(items[index], "user")]
    steps = _group(
        items, rest, lambda item, previous: isinstance(previous, OUTPUT_TYPES) and not isinstance(item, OUTPUT_TYPES)
    )
    return [*exchanges[:-1], *steps[:-1]]


def _group(
    items: Sequence[Item | Unknown],
    indexes: Iterable[int],
    begins: Callable[[Item | Unknown, Item | Unknown | None], bool],
) -> list[list[int]]:
    """Group items into blocks. `begins` gets an item and the one before it, and decides where a block begins.

    A call and its output are never separated: no block begins between the two.
    """
    droppable = [index for index in indexes if not _stays(items[index])]
    last_output = _find_last_outputs(items, droppable)
    blocks: list[list[int]] = []
    pending_until = -1
    previous: Item | Unknown | None = None
    for index in droppable:
        item = items[index]
        if not blocks or (index > pending_until and begins(item, previous)):
            blocks.append([])
        blocks[-1].append(index)
        pending_until = max(pending_until, last_output.get(index, -1))
        previous = item
    return blocks


def _find_last_outputs(items: Sequence[Item | Unknown], indexes: Iterable[int]) -> dict[int, int]:
    """Map the index of each call to the index of its last output."""
    last: dict[int, int] = {}
    calls: dict[str, int] = {}
    for index in indexes:
        item = items[index]
        if isinstance(item, CALL_TYPES) and item.call_id is not None:
            calls[item.call_id] = index
        elif isinstance(item, OUTPUT_TYPES) and item.call_id in calls:
            last[calls[item.call_id]] = index
    return last


def _stays(item: Item | Unknown) -> bool:
    return isinstance(item, AdditionalTools) or _is_from(item, "system", "developer")


def _is_from(item: Item | Unknown, *roles: str) -> bool:
    return isinstance(item, Message) and item.role in roles


def _shorten(turn: Turn, blocks: Sequence[Sequence[int]]) -> Turn:
    dropped = {index for block in blocks for index in block}
    items = [item for index, item in enumerate(turn.items) if index not in dropped]
    return msgspec.structs.replace(turn, items=items)
