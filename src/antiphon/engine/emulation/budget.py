"""What the rounds of one response share: second chances, searches, calls, and the tokens they take."""

from antiphon.protocol.response import Usage

MOST_SEARCHES = 8


class Budget:
    """What is left. `searches` below zero: the model has gone on searching after the last one."""

    def __init__(self, *, most_searches: int | None = None, most_tokens: int | None = None) -> None:
        self._most_tokens = most_tokens
        self._most_searches = min(most_searches or MOST_SEARCHES, MOST_SEARCHES)
        self.retries = 1
        self.searches = self._most_searches
        self.calls = 0
        self.rounds = 0
        self.spent: Usage | None = None

    @property
    def has_called(self) -> bool:
        """Whether the model has called a tool that it may call, and rightly."""
        return self.calls > 0 or self.searches < self._most_searches

    def spend(self, usage: Usage, before: Usage | None) -> Usage:
        """The tokens of all rounds, when `before` is what the earlier ones took."""
        self.spent = usage if before is None else before + usage
        return self.spent

    def tokens_left(self) -> int | None:
        """How many tokens the next round may say; None if that was not limited."""
        if self._most_tokens is None or self.spent is None:
            return self._most_tokens
        return max(1, self._most_tokens - self.spent.output_tokens)
