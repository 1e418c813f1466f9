"""The context window of a model: its size, the tokens in use, and the limit for a compacted conversation."""

import re
from collections.abc import Sequence

import msgspec

from antiphon.backends.base import Turn
from antiphon.bounds import remove_oldest
from antiphon.engine.serve.compaction.expansion import is_never_compacted
from antiphon.engine.serve.routing import ModelRoute
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown

# The size of a window that is not known, and the default threshold as a share of the window.
ASSUMED_WINDOW = 128_000
DEFAULT_THRESHOLD = 0.8
# Share of the room that a compacted conversation may use: the next turn needs some, too.
_USABLE_SHARE = 0.75
# Minimum tokens for a compacted conversation: in less, a summary is useless.
_MIN_GOAL = 256
# Maximum number of models whose windows are remembered.
_MAX_LEARNED = 1000
# The window size in a server's error message, such as "... context length is 4096 tokens". A comparison comes first:
# in "context limit: 1000 + 199500 > 200000" the other numbers depend on the request.
_REPORTED_SIZES = (
    re.compile(r"[<>]=? ?(\d{3,9})\b"),
    re.compile(
        r"(?:maximum|context|limit|allowed|<=|>)[^\d.]{0,40}(?<!\bby )\b(\d{3,9})\b|(\d{3,9}) maximum", re.IGNORECASE
    ),
)


class ContextWindow(msgspec.Struct, frozen=True):
    """A model's context window, in tokens.

    `fixed` are the tokens of instructions, tools and other items that are never compacted. `room` is left for the
    conversation, `goal` is the part of it that the request wants to use, and `limit` the maximum for a whole turn.
    `is_guess` is True if the size is not known.
    """

    size: int
    fixed: int
    room: int
    goal: int
    is_guess: bool = False

    @property
    def limit(self) -> int:
        return self.fixed + int(self.room * _USABLE_SHARE)


async def count_conversation(route: ModelRoute, turn: Turn, conversation: Sequence[Item | Unknown]) -> int:
    """Count the tokens of the turn with this conversation instead of its own."""
    fixed = [item for item in turn.items if is_never_compacted(item)]
    return await route.count_tokens(msgspec.structs.replace(turn, items=[*fixed, *conversation]))


class LearnedWindow(msgspec.Struct):
    """The facts about a window of unknown size that a model's answers have shown, in tokens.

    `size` is the size that a refusal stated, or for which a turn was accepted after refusals. `accepted` is the longest
    turn that was not refused.
    """

    size: int = ASSUMED_WINDOW
    accepted: int = 0


class ContextWindows:
    """Measures context windows, and remembers what models have shown about windows of unknown size."""

    def __init__(self) -> None:
        self._learned: dict[str, LearnedWindow] = {}

    async def measure(self, route: ModelRoute, turn: Turn) -> ContextWindow:
        """Measure the window. Raises ContextLengthExceeded if instructions and tools leave no room in it."""
        known = _find_known_size(route)
        return await self._measure(route, turn, size=known or self.find_learned(route).size, is_guess=known is None)

    async def shrink(
        self, route: ModelRoute, turn: Turn, window: ContextWindow, refusal: ContextLengthExceeded
    ) -> ContextWindow | None:
        """Return a smaller window after the model refused a turn that should fit. None if no room would be left."""
        # Another number in the message, or a server that counts tokens differently, gives no usable size.
        reported = _find_reported_size(refusal)
        size = reported if _MIN_GOAL < reported < window.size else window.size // 2
        try:
            smaller = await self._measure(route, turn, size=size, is_guess=window.is_guess)
        except ContextLengthExceeded:
            return None
        if window.is_guess and size == reported:
            self._learn(route, size)
        return smaller

    async def exceeds_threshold(self, route: ModelRoute, turn: Turn, retained: Sequence[Item | Unknown] | None) -> bool:
        """Return True if the turn exceeds the threshold of its request.

        `retained` are the items of an earlier compaction. If they alone exceed the threshold, the turn counts only
        when enough was added since: else there would be a compaction in every turn.
        """
        threshold = self._find_threshold(route, turn)
        counted = await route.count_tokens(turn)
        if retained is None or counted <= threshold:
            return counted > threshold
        retained_size = await count_conversation(route, turn, retained)
        return (
            retained_size <= threshold
            or counted - retained_size > _MIN_GOAL
            or counted > self._find_size(route) * DEFAULT_THRESHOLD
        )

    def find_learned(self, route: ModelRoute) -> LearnedWindow:
        """Return the facts that are known about the window of the route's model."""
        return self._learned.get(route.first.address) or LearnedWindow()

    def learn_refusal(self, route: ModelRoute, refusal: ContextLengthExceeded) -> None:
        """Remember the window size that a refusal states."""
        reported = _find_reported_size(refusal)
        if reported > _MIN_GOAL and _find_known_size(route) is None:
            self._learn(route, reported)

    def learn_shrunk(self, route: ModelRoute, window: ContextWindow) -> None:
        """Remember a smaller window for which the model accepted a turn.

        It is not remembered before: the model may refuse every turn of a request, for a reason that no other request
        has, such as the number of tokens to write.
        """
        if window.is_guess:
            self._learn(route, window.size)

    def learn_accepted(self, route: ModelRoute, tokens: int) -> None:
        """Remember that the model accepted a turn of this length."""
        learned = self._find_or_add(route)
        learned.accepted = max(learned.accepted, tokens)

    def _learn(self, route: ModelRoute, size: int) -> None:
        learned = self._find_or_add(route)
        learned.size = size
        learned.accepted = min(learned.accepted, size)

    def _find_or_add(self, route: ModelRoute) -> LearnedWindow:
        learned = self._learned.setdefault(route.first.address, LearnedWindow())
        remove_oldest(self._learned, _MAX_LEARNED)
        return learned

    async def _measure(self, route: ModelRoute, turn: Turn, *, size: int, is_guess: bool) -> ContextWindow:
        fixed = await count_conversation(route, turn, [])
        spare = size - fixed
        room = spare - min(turn.request.max_output_tokens or spare // 4, spare // 2)
        if room < 1:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {size} tokens. System and developer messages, instructions "
                f"and tools take {fixed} of them, which leaves no room for a conversation. A compaction cannot shorten "
                "these.",
                param="input",
            )
        wanted = max(self._find_threshold(route, turn) - fixed, _MIN_GOAL)
        return ContextWindow(size, fixed, room, min(room, wanted), is_guess)

    def _find_threshold(self, route: ModelRoute, turn: Turn) -> int:
        thresholds = [each.compact_threshold for each in turn.request.context_management or ()]
        return min(
            [each for each in thresholds if each is not None] or [int(self._find_size(route) * DEFAULT_THRESHOLD)]
        )

    def _find_size(self, route: ModelRoute) -> int:
        return _find_known_size(route) or self.find_learned(route).size


def _find_known_size(route: ModelRoute) -> int | None:
    # The smallest window: every candidate must be able to serve the turn.
    known = [candidate.model.context_window for candidate in route.candidates]
    return min((window for window in known if window is not None), default=None)


def _find_reported_size(refusal: ContextLengthExceeded) -> int:
    """Return the window size in the message of a refusal, or 0."""
    message = refusal.message.replace(",", "")
    found = next(filter(None, (pattern.search(message) for pattern in _REPORTED_SIZES)), None)
    return int(next(filter(None, found.groups()))) if found is not None else 0
