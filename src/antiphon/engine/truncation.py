"""`truncation: auto`: dropping the oldest turns until the rest fits the model's window."""

from collections.abc import Sequence

import msgspec

from antiphon.backends.base import Backend, Deltas, Turn
from antiphon.engine.history import CALLS, OUTPUTS
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol.hosted import AdditionalTools
from antiphon.protocol.items import Item, Message
from antiphon.protocol.open import Unknown


class Started(msgspec.Struct, frozen=True):
    """A turn under way, and how many items it had to leave out."""

    deltas: Deltas
    dropped: int


async def start_turn(backend: Backend, turn: Turn) -> Started:
    """Begin the turn; if it is too long and may be shortened, without as many of its oldest turns as must go."""
    try:
        return Started(await backend.stream(turn), 0)
    except ContextLengthExceeded:
        if turn.request.truncation != "auto":
            raise
    blocks = split_turns(turn.items)
    last = len(blocks) - 1
    fewest = await _search(backend, turn, blocks)
    for dropped in range(fewest, last):
        try:
            shorter = _shorten(turn, blocks, dropped)
            return Started(await backend.stream(shorter), len(turn.items) - len(shorter.items))
        except ContextLengthExceeded:
            continue
    shortest = _shorten(turn, blocks, last)
    return Started(await backend.stream(shortest), len(turn.items) - len(shortest.items))


async def _search(backend: Backend, turn: Turn, blocks: Sequence[Sequence[int]]) -> int:
    """The fewest turns to drop, by the count of tokens alone."""
    window = next((model.context_window for model in backend.models() if model.id == turn.request.model), None)
    if window is None:
        return 1
    room = window - (turn.request.max_output_tokens or 1)
    low, high = 1, max(1, len(blocks) - 1)
    while low < high:
        middle = (low + high) // 2
        if await backend.count_tokens(_shorten(turn, blocks, middle)) <= room:
            high = middle
        else:
            low = middle + 1
    return low


def split_turns(items: Sequence[Item | Unknown]) -> list[list[int]]:
    """The indexes of the items that can be dropped, turn by turn, oldest first: all but system messages and tools.

    A turn begins with a user message. A call and its output are never parted: turns that share one are one.
    """
    blocks: list[list[int]] = []
    home: dict[str, int] = {}
    for index, item in enumerate(items):
        if isinstance(item, AdditionalTools) or (isinstance(item, Message) and item.role in ("system", "developer")):
            continue
        if not blocks or (isinstance(item, Message) and item.role == "user"):
            blocks.append([])
        if isinstance(item, CALLS) and item.call_id is not None:
            home[item.call_id] = len(blocks) - 1
        elif isinstance(item, OUTPUTS) and item.call_id in home:
            first = home[item.call_id]
            if first < len(blocks) - 1:
                blocks = [*blocks[:first], [each for block in blocks[first:] for each in block]]
                home = {call_id: min(place, first) for call_id, place in home.items()}
        blocks[-1].append(index)
    return blocks


def _shorten(turn: Turn, blocks: Sequence[Sequence[int]], dropped: int) -> Turn:
    gone = {index for block in blocks[:dropped] for index in block}
    kept = [item for index, item in enumerate(turn.items) if index not in gone]
    return msgspec.structs.replace(turn, items=kept)
