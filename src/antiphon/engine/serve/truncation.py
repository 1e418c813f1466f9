"""`truncation: auto`: dropping the oldest turns, and then the oldest steps of the last, until the rest fits."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from antiphon.backends.base import Backend, Turn
from antiphon.engine.items import CALL_TYPES, OUTPUT_TYPES
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol.hosted import AdditionalTools
from antiphon.protocol.items import Item, Message
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Deltas


class Started(msgspec.Struct, frozen=True):
    """A turn under way, and how many items it had to leave out."""

    deltas: Deltas
    dropped: int


async def start_turn(backend: Backend, turn: Turn) -> Started:
    """Begin the turn; if it is too long and may be shortened, without as many of its oldest turns as must go."""
    try:
        return Started(await backend.stream(turn), 0)
    except ContextLengthExceeded:
        blocks = find_droppable(turn.items) if turn.request.truncation == "auto" else []
        if not blocks:
            raise
    dropped, more = await _search(backend, turn, blocks), 1
    while dropped < len(blocks):
        try:
            return await _start_without(blocks[:dropped], backend, turn)
        except ContextLengthExceeded:
            # The count was wrong, or there was none. Each attempt may be a request to somebody else: not one a block.
            dropped, more = dropped + more, 2 * more
    return await _start_without(blocks, backend, turn)


async def _start_without(blocks: Sequence[Sequence[int]], backend: Backend, turn: Turn) -> Started:
    shorter = _shorten(turn, blocks)
    return Started(await backend.stream(shorter), len(turn.items) - len(shorter.items))


async def _search(backend: Backend, turn: Turn, blocks: Sequence[Sequence[int]]) -> int:
    """The fewest blocks to drop, by the count of tokens alone."""
    window = _find_window(backend, turn)
    if window is None:
        return 1
    # Many clients ask for more than a small model can say. The answer is not worth most of the question.
    room = window - min(turn.request.max_output_tokens or 1, window // 4)
    low, high = 1, max(1, len(blocks))
    while low < high:
        middle = (low + high) // 2
        if await backend.count_tokens(_shorten(turn, blocks[:middle])) <= room:
            high = middle
        else:
            low = middle + 1
    return low


def _find_window(backend: Backend, turn: Turn) -> int | None:
    unlisted = backend.capabilities.context_window
    return next((model.context_window for model in backend.models() if model.id == turn.request.model), unlisted)


async def count_tokens(backend: Backend, turn: Turn) -> int:
    """How many tokens the model would read of the turn, shortened as `start_turn` would."""
    counted = await backend.count_tokens(turn)
    window = _find_window(backend, turn)
    if turn.request.truncation != "auto" or window is None or counted < window:
        return counted
    blocks = find_droppable(turn.items)
    return await backend.count_tokens(_shorten(turn, blocks[: await _search(backend, turn, blocks)]))


def find_droppable(items: Sequence[Item | Unknown]) -> list[list[int]]:
    """The indexes of the items that can be dropped, block by block, in the order in which they go.

    First the turns but the last, oldest first: a turn begins with a user message. Then the steps of the last turn but
    its last step: a step is what the model said and what its calls came to. So what the user asked last stays, and so
    does what a long loop of calls has just found out. System messages and tools always stay.
    """
    turns = _group(items, range(len(items)), lambda item, _: _is_from(item, "user"))
    if not turns:
        return []
    said = [index for index in turns[-1] if not _is_from(items[index], "user")]
    steps = _group(
        items, said, lambda item, before: isinstance(before, OUTPUT_TYPES) and not isinstance(item, OUTPUT_TYPES)
    )
    return [*turns[:-1], *steps[:-1]]


def _group(
    items: Sequence[Item | Unknown],
    indexes: Iterable[int],
    begins: Callable[[Item | Unknown, Item | Unknown | None], bool],
) -> list[list[int]]:
    """Blocks of items; `begins` is asked about an item and the one before it.

    A call and its output are never parted: no block begins between the two.
    """
    places = [index for index in indexes if not _stays(items[index])]
    answered = _find_last_outputs(items, places)
    blocks: list[list[int]] = []
    owed_until = -1
    before: Item | Unknown | None = None
    for index in places:
        item = items[index]
        if not blocks or (index > owed_until and begins(item, before)):
            blocks.append([])
        blocks[-1].append(index)
        owed_until = max(owed_until, answered.get(index, -1))
        before = item
    return blocks


def _find_last_outputs(items: Sequence[Item | Unknown], places: Iterable[int]) -> dict[int, int]:
    """Where the last output of each call stands, by where the call stands."""
    last: dict[int, int] = {}
    calls: dict[str, int] = {}
    for index in places:
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
    gone = {index for block in blocks for index in block}
    kept = [item for index, item in enumerate(turn.items) if index not in gone]
    return msgspec.structs.replace(turn, items=kept)
