"""What the rounds of one response share: second chances, searches, calls, and the tokens they take."""

from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage

MOST_SEARCHES = 8


class Budget:
    """What is left. `searches` below zero: the model has gone on searching after the last one."""

    def __init__(self, *, most_searches: int | None = None, most_tokens: int | None = None) -> None:
        self._most_tokens = most_tokens
        self.retries = 1
        self.searches = min(most_searches or MOST_SEARCHES, MOST_SEARCHES)
        self.calls = 0
        self.rounds = 0
        self.spent: Usage | None = None

    def spend(self, usage: Usage, before: Usage | None) -> Usage:
        """The tokens of all rounds, when `before` is what the earlier ones took."""
        self.spent = usage if before is None else _add(before, usage)
        return self.spent

    def tokens_left(self) -> int | None:
        """How many tokens the next round may say; None if that was not limited."""
        if self._most_tokens is None or self.spent is None:
            return self._most_tokens
        return max(1, self._most_tokens - self.spent.output_tokens)


def _add(left: Usage, right: Usage) -> Usage:
    ours, theirs = left.input_tokens_details, right.input_tokens_details
    reasoning = left.output_tokens_details.reasoning_tokens + right.output_tokens_details.reasoning_tokens
    return Usage(
        left.input_tokens + right.input_tokens,
        left.output_tokens + right.output_tokens,
        left.total_tokens + right.total_tokens,
        InputTokensDetails(
            ours.cached_tokens + theirs.cached_tokens, ours.cache_write_tokens + theirs.cache_write_tokens
        ),
        OutputTokensDetails(reasoning),
        estimated=left.estimated or right.estimated,
    )
