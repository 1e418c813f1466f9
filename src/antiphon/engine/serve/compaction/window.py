"""How much a model can read, how much of that is taken, and how much a compacted conversation may take."""

import re
from collections.abc import Sequence

import msgspec

from antiphon.backends.base import Turn
from antiphon.engine.serve.compaction.expansion import is_never_compacted
from antiphon.engine.serve.routing import Route
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown

# What a window is taken for when nobody knows it, and how full it may become when the request does not say.
ASSUMED_WINDOW = 128_000
FULL = 0.8
# So much of the room may be taken: the next turn must find some, too.
_TAKEN = 0.75
# Below this there is no summary worth the name.
_LEAST_GOAL = 256
# Where a server that refuses a turn as too long says how long one may be: "... context length is 4096 tokens".
_TOLD_SIZE = re.compile(
    r"(?:maximum|context|limit|allowed|<=|>)[^\d.]{0,40}(\d{3,9})\b|(\d{3,9}) maximum", re.IGNORECASE
)


class ContextWindow(msgspec.Struct, frozen=True):
    """In tokens: all that the model can read and write, what it reads in any case, and the room for a conversation.

    `goal` is how much of the room the request wants to be used, `limit` how much a turn may count in all. If nobody
    knows the size, it is a guess.
    """

    size: int
    rules: int
    room: int
    goal: int
    is_guess: bool = False

    @property
    def limit(self) -> int:
        return self.rules + int(self.room * _TAKEN)


async def count_conversation(route: Route, turn: Turn, conversation: Sequence[Item | Unknown]) -> int:
    """The tokens of the turn with this conversation instead of its own."""
    rules = [item for item in turn.items if is_never_compacted(item)]
    return await route.count_tokens(msgspec.structs.replace(turn, items=[*rules, *conversation]))


async def measure_window(route: Route, turn: Turn) -> ContextWindow:
    """Raises ContextLengthExceeded if what no compaction can shorten takes all of it."""
    known = _find_known(route)
    return await _measure(route, turn, size=known or ASSUMED_WINDOW, is_guess=known is None)


async def shrink_window(
    route: Route, turn: Turn, window: ContextWindow, refusal: ContextLengthExceeded
) -> ContextWindow | None:
    """What the window is taken for after a turn that had room in it was refused. None if no room would be left."""
    found = _TOLD_SIZE.search(refusal.message.replace(",", ""))
    told = int(found[1] or found[2]) if found is not None else 0
    # A number that explains nothing is of something else, or the tokens are counted otherwise there.
    size = told if _LEAST_GOAL < told < window.size else window.size // 2
    try:
        return await _measure(route, turn, size=size, is_guess=window.is_guess)
    except ContextLengthExceeded:
        return None


async def _measure(route: Route, turn: Turn, *, size: int, is_guess: bool) -> ContextWindow:
    rules = await count_conversation(route, turn, [])
    spare = size - rules
    room = spare - min(turn.request.max_output_tokens or spare // 4, spare // 2)
    if room < 1:
        raise ContextLengthExceeded(
            f"This model's context window is {size} tokens. System and developer messages, instructions and tools take "
            f"{rules} of them, which leaves no room for a conversation. A compaction cannot shorten these.",
            param="input",
        )
    wanted = max(_find_threshold(route, turn) - rules, _LEAST_GOAL)
    return ContextWindow(size, rules, room, min(room, wanted), is_guess)


async def exceeds_threshold(route: Route, turn: Turn, kept: Sequence[Item | Unknown] | None) -> bool:
    """Whether the turn takes more than its request wants it to. `kept` is what an earlier compaction has left of it.

    If that is too much already, another compaction waits until something worth it has been added: else there would be
    one in every turn.
    """
    threshold = _find_threshold(route, turn)
    counted = await route.count_tokens(turn)
    if kept is None or counted <= threshold:
        return counted > threshold
    least = await count_conversation(route, turn, kept)
    return least <= threshold or counted - least > _LEAST_GOAL or counted > _find_size(route) * FULL


def _find_threshold(route: Route, turn: Turn) -> int:
    asked = [each.compact_threshold for each in turn.request.context_management or ()]
    return min([each for each in asked if each is not None] or [int(_find_size(route) * FULL)])


def _find_size(route: Route) -> int:
    return _find_known(route) or ASSUMED_WINDOW


def _find_known(route: Route) -> int | None:
    # Whoever steps in for the first must be able to read it as well.
    known = [candidate.model.context_window for candidate in route.candidates]
    return min((window for window in known if window is not None), default=None)
